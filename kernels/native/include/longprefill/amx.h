// bf16 products on AMX, by oneDNN's kernels behind ATen. Everything here exists with LONGPREFILL_AMX only.
//
// A lies row by row; B in pairs of rows: b[(k / 2) * ldb * 2 + n * 2 + k % 2]; C is fp32. A number pair of B is one
// 32-bit word, so a transpose of words turns rows of keys into B.
#pragma once

#include "longprefill/vector.h"

#if defined(LONGPREFILL_AMX)
#include <ATen/native/CPUBlas.h>

namespace longprefill {
namespace {

typedef c10::BFloat16 Bf16;

constexpr int64_t AMX_DEPTH = 32;  // products of one tile along k: depths are padded to it with zeros
constexpr int64_t AMX_COLUMNS = 16;

// False where torch's oneDNN was told to leave AMX alone (ONEDNN_MAX_CPU_ISA) or cannot use it.
inline bool has_amx_products() {
    static const bool has = at::native::cpublas::could_pack(at::kBFloat16);
    return has;
}

// c[m, n] = a[m, k] b[k, n], added to c if `add`. Each new shape costs oneDNN about a millisecond once a thread: keep
// the shapes few.
LP_INLINE void amx_multiply(int64_t m, int64_t n, int64_t k, const Bf16* a, int64_t lda, const Bf16* b, int64_t ldb,
                            float* c, int64_t ldc, bool add) {
    at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, true);
}

// Gives the tile registers back when a thread has done its products.
struct AmxProducts {
    AmxProducts() = default;
    AmxProducts(const AmxProducts&) = delete;
    AmxProducts& operator=(const AmxProducts&) = delete;
    ~AmxProducts() { at::native::cpublas::brgemm_release(true); }
};

// Transposes 16 x 16 words of 32 bits in registers.
LP_INLINE void transpose_words(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
    // x[4 i + j] holds column 4 l + j of rows 4 i to 4 i + 3 in its 128-bit lane l.
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        const __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
        y[j] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[4 + j] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[8 + j] = _mm512_shuffle_i32x4(a, c, 0xdd);
        y[12 + j] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// 32 numbers to bf16, nearest even: `low` becomes the first 16.
LP_INLINE __m512i to_bf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// The bf16 of `low` in the lower, of `high` in the upper half of each word.
LP_INLINE __m512i to_bf16_pairs(__m512 low, __m512 high) {
    const __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    const __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}

// Rows of bf16 (16 of them, `row` apart, `width` a multiple of 32) to columns [column, column + 16) of a B whose rows
// hold ldb numbers.
LP_INLINE void pack_sixteen_rows(const Bf16* rows, int64_t row, int64_t width, Bf16* b, int64_t ldb, int64_t column) {
    for (int64_t c = 0; c < width; c += 32) {
        __m512i words[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) words[i] = _mm512_loadu_si512(rows + i * row + c);
        transpose_words(words);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(b + (c / 2 + i) * ldb * 2 + column * 2, words[i]);
    }
}

}  // namespace
}  // namespace longprefill
#endif
