// What all forms of attention need of a softmax over blocks of keys.
//
// Each query and head has a maximum of the logits so far, NONE before the first, and sums of exp(logit - base) and of the
// values weighted by it. Logits of -inf leave the maximum at NONE: the base is 0 then, so they weigh 0 and not
// exp(-inf + inf). Weight 0 is a weight: times an infinite value it is NaN, as in the formula, and a query that sees
// nothing but -inf gets 0 / 0. What a query does not see has no weight at all: it is left out of both sums.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>

#include "longprefill/amx.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

// Whether query t has a key: with `indices`, int32 [T, S], only if one of its places has.
inline bool sees_some(const std::optional<at::Tensor>& indices, int64_t t) {
    if (!indices) return true;
    const int32_t* positions = indices->const_data_ptr<int32_t>() + t * indices->size(1);
    return std::any_of(positions, positions + indices->size(1), [](int32_t position) { return position >= 0; });
}

LP_INLINE float base_of(float max) { return max == NONE ? 0.0f : max; }
LP_INLINE Vec base_of(Vec max) { return max == NONE ? Vec{} : max; }

#if defined(LONGPREFILL_AMX)
// The maximum that weights are relative to stays until a logit passes it by more, in powers of two: weights up to
// 2^MARGIN lose nothing in bf16 and fp32, and the output needs no scaling for most blocks.
constexpr float MARGIN = 10.0f;

// 2^x for x <= 16 or so, 6e-7 relative: weights are rounded to bf16 anyway. 0 for -inf, NaN for NaN.
LP_INLINE __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // inf - inf is NaN, but 2^whole is 0 there and the scaling makes 0 of any finite p.
    const __m512 r = _mm512_max_ps(_mm512_sub_ps(x, whole), _mm512_set1_ps(-0.5f));
    __m512 p = _mm512_set1_ps(1.33335581e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.61812910e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.55041086e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40226507e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93147180e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

#endif

}  // namespace
}  // namespace longprefill
