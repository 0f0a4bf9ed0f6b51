// SIMD by the compiler's vector extensions: one source for SSE2 or NEON (4 lanes), AVX2 (8) and AVX-512 (16).
//
// The lane count follows from the flags of the translation unit (kernels/native/isa.py). Everything is in an unnamed
// namespace on purpose: each translation unit has its own copy, compiled for its own instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <c10/util/BFloat16.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace longprefill {
namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t IntVec __attribute__((vector_size(LANES * 4)));
typedef uint32_t UintVec __attribute__((vector_size(LANES * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(LANES * 2)));
typedef float UnalignedVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t UnalignedHalfBits __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

#define LP_INLINE inline __attribute__((always_inline))
// For loops that need all registers: inlined into a large caller, gcc keeps their sums in memory.
#define LP_NOINLINE __attribute__((noinline))

LP_INLINE Vec splat(float x) { return x - Vec{}; }

LP_INLINE int64_t padded(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

LP_INLINE Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
LP_INLINE void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

// bf16: the upper half of an fp32; stores round to nearest even and keep NaN a NaN.
LP_INLINE Vec load(const c10::BFloat16* p) {
    const HalfBits bits = *reinterpret_cast<const UnalignedHalfBits*>(p);
    return (Vec)(__builtin_convertvector(bits, UintVec) << 16);
}
// The nearest bf16, ties to even, in the low half of each lane. The instruction for it would make denormals 0.
LP_INLINE UintVec bf16_bits(Vec x) {
    const UintVec bits = (UintVec)x;
    const UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return x == x ? rounded : UintVec{} + 0x7fc0u;
}
LP_INLINE void store(c10::BFloat16* p, Vec x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    // gcc narrows lane by lane
    const __m256i bits = (__m256i)bf16_bits(x), both = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(both));
#else
    *reinterpret_cast<UnalignedHalfBits*>(p) = __builtin_convertvector(bf16_bits(x), HalfBits);
#endif
}

// What a store of T and a load after it give.
template <typename T>
LP_INLINE Vec rounded_to(Vec x) {
    if constexpr (std::is_same_v<T, float>) return x;
    return (Vec)(bf16_bits(x) << 16);
}

// The first `count` < LANES elements; the other lanes are 0.
template <typename T>
LP_INLINE Vec load_first(const T* p, int count) {
    T padded[LANES];
    std::memset(static_cast<void*>(padded), 0, sizeof(padded));
    std::memcpy(static_cast<void*>(padded), static_cast<const void*>(p), count * sizeof(T));
    return load(padded);
}
template <typename T>
LP_INLINE void store_first(T* p, Vec x, int count) {
    T padded[LANES];
    store(padded, x);
    std::memcpy(static_cast<void*>(p), static_cast<const void*>(padded), count * sizeof(T));
}

// body(offset, count) for every full vector of [0, size) with count = LANES, then once for the rest. `load_some` and
// `store_some` fold to plain loads and stores where the compiler knows count.
template <typename T>
LP_INLINE Vec load_some(const T* p, int count) { return count == LANES ? load(p) : load_first(p, count); }
template <typename T>
LP_INLINE void store_some(T* p, Vec x, int count) {
    if (count == LANES) store(p, x); else store_first(p, x, count);
}
template <typename Body>
LP_INLINE void for_each_vector(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, static_cast<int>(size - i));
}

LP_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN
LP_INLINE Vec absolute(Vec x) { return (Vec)((UintVec)x & 0x7fffffffu); }

// Index tables for shuffles: even and odd lanes of two vectors side by side.
template <int ODD>
LP_INLINE Vec every_second(Vec a, Vec b) {
#if defined(__AVX512F__)
    return __builtin_shuffle(a, b, IntVec{ODD, 2 + ODD, 4 + ODD, 6 + ODD, 8 + ODD, 10 + ODD, 12 + ODD, 14 + ODD, 16 + ODD,
                                          18 + ODD, 20 + ODD, 22 + ODD, 24 + ODD, 26 + ODD, 28 + ODD, 30 + ODD});
#elif defined(__AVX2__)
    return __builtin_shuffle(a, b, IntVec{ODD, 2 + ODD, 4 + ODD, 6 + ODD, 8 + ODD, 10 + ODD, 12 + ODD, 14 + ODD});
#else
    return __builtin_shuffle(a, b, IntVec{ODD, 2 + ODD, 4 + ODD, 6 + ODD});
#endif
}

LP_INLINE Vec add_pairs(Vec a, Vec b) { return every_second<0>(a, b) + every_second<1>(a, b); }

// Lane i of the result is the sum of the lanes of x[i], always in the same order.
LP_INLINE Vec sums_of(Vec (&x)[LANES]) {
#pragma GCC unroll 8
    for (int width = LANES; width > 1; width /= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < width / 2; ++i) x[i] = add_pairs(x[2 * i], x[2 * i + 1]);
    }
    return x[0];
}

LP_INLINE float sum(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);  // in the order of the loop below
#else
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    return lanes[0];
#endif
}

LP_INLINE Vec square_root(Vec x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Vec)_mm256_sqrt_ps((__m256)x);
#elif defined(__x86_64__)
    return (Vec)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < LANES; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

// e^x - 1 for |x| <= EXPM1_LIMIT, to a relative 1e-7 or so.
constexpr float EXPM1_LIMIT = 0.3466f;  // ln 2 / 2
LP_INLINE Vec small_expm1(Vec x) {
    Vec p = x * (1.0f / 5040) + (1.0f / 720);
    p = p * x + (1.0f / 120);
    p = p * x + (1.0f / 24);
    p = p * x + (1.0f / 6);
    p = p * x + 0.5f;
    return (p * x) * x + x;
}

// e^x to 1 ulp or so; 0 below -87.3 (the result would be denormal) and for -inf, infinity above 88.7, NaN for NaN.
LP_INLINE Vec exp(Vec x) {
#if defined(__AVX512F__)
    const __m512 kept = _mm512_min_ps(_mm512_set1_ps(89.0f), (__m512)x);  // NaN stays
    const Vec whole = (Vec)_mm512_roundscale_ps(_mm512_mul_ps(kept, _mm512_set1_ps(1.44269504f)),
                                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec r = ((Vec)kept - whole * 0.693145752f) - whole * 1.42860677e-6f;
#else
    const Vec shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the rounded quotient sits in the low bits
    const Vec whole = shifted - 12582912.0f;
    const Vec r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
#endif
    const Vec p = small_expm1(r) + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 inside = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(inside, (__m512)p, (__m512)whole);
#else
    // Added to the exponent of p; what that makes of x outside the limits is not taken. 1 p for 2^128 is below 1.
    const Vec scaled = (Vec)((IntVec)p + ((IntVec)shifted << 23));
    const Vec limited = x < -87.33654f ? Vec{} : scaled;
    return x <= 88.72283f ? limited : x * std::numeric_limits<float>::infinity();
#endif
}

// 1 / x to 1 ulp or so for x from 2^-125 to 2^125: a division of a whole vector takes as long as sixteen products.
LP_INLINE Vec reciprocal(Vec x) {
#if defined(__AVX512F__)
    const Vec guess = (Vec)_mm512_rcp14_ps((__m512)x);
    return guess + guess * (1.0f - x * guess);
#else
    return splat(1.0f) / x;
#endif
}

// 1 / (1 + e^-x), accurate at both ends.
LP_INLINE Vec sigmoid(Vec x) {
    const Vec z = exp(-absolute(x));
    const Vec numerator = x < 0.0f ? z : splat(1.0f);
    return numerator * reciprocal(1.0f + z);
}

// log(1 + z) for z in [0, 1] by the series of atanh: relative error below 1e-7.
LP_INLINE Vec log1p_unit(Vec z) {
    const Vec s = z / (2.0f + z), t = s * s;
    Vec p = t * (1.0f / 15) + (1.0f / 13);
    p = p * t + (1.0f / 11);
    p = p * t + (1.0f / 9);
    p = p * t + (1.0f / 7);
    p = p * t + 0.2f;
    p = p * t + (1.0f / 3);
    return 2.0f * (s + s * (t * p));
}

LP_INLINE Vec softplus(Vec x) {
    const Vec positive = x < 0.0f ? Vec{} : x;
    return positive + log1p_unit(exp(-absolute(x)));
}

// Denormal inputs and results count as 0 inside its scope, whatever the process has set: decaying states pass through
// denormals, on which a core is many times slower.
class FlushDenormals {
public:
#if defined(__x86_64__)
    FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before_); }
private:
    unsigned before_;
#elif defined(__aarch64__)
    FlushDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | (uint64_t{1} << 24)));
    }
    ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_)); }
private:
    uint64_t before_;
#endif
};

}  // namespace
}  // namespace longprefill
