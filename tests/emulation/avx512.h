// AVX-512 and AMX by plain loops, for processors that have neither: included in front of every source of the kernels by
// the compiler in this folder. What is tested so is the sources of the avx512 and amx libraries: their steps of 16
// numbers, their packing, tails and masks. The processor's own instructions, and what the compiler makes of the sources
// with them, are tested where the processor has them.
//
// Each function does what the instruction of its name does, rounding, NaN and denormals included; which numbers make
// which NaN is left open. Types are the compiler's own.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(LONGPREFILL_AMX)
#include <ATen/native/CPUBlas.h>
#endif

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512CD__ 1

namespace longprefill_emulated {
namespace {

template <typename To, typename From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// The lanes of a vector, as numbers of type T.
template <typename T, typename V = __m512>
struct Lanes {
    static constexpr int COUNT = sizeof(V) / sizeof(T);
    T x[COUNT];
    Lanes() : x{} {}
    explicit Lanes(V v) { std::memcpy(x, &v, sizeof(V)); }
    operator V() const {
        V v;
        std::memcpy(&v, x, sizeof(V));
        return v;
    }
};
typedef Lanes<float> Floats;
typedef Lanes<int32_t, __m512i> Words;
typedef Lanes<uint16_t, __m512i> Halves;

template <typename Result, typename Body>
inline Result each(Body body) {
    Result result;
    for (int i = 0; i < Result::COUNT; ++i) result.x[i] = body(i);
    return result;
}
inline bool in(uint32_t mask, int lane) { return mask >> lane & 1; }

inline __m512 set1_ps(float x) { return each<Floats>([&](int) { return x; }); }
inline __m512i set1_epi32(int x) { return each<Words>([&](int) { return x; }); }
inline __m512i set1_epi16(short x) { return each<Halves>([&](int) { return static_cast<uint16_t>(x); }); }
inline __m512 setzero_ps() { return Floats(); }
template <typename... T>
inline __m512i setr_epi32(T... x) {
    static_assert(sizeof...(x) == 16, "16 words");
    const int32_t words[] = {x...};
    return each<Words>([&](int i) { return words[i]; });
}

inline __m512 loadu_ps(const void* p) {
    Floats lanes;
    std::memcpy(lanes.x, p, 64);
    return lanes;
}
inline __m512i loadu_si512(const void* p) {
    Words lanes;
    std::memcpy(lanes.x, p, 64);
    return lanes;
}
inline void storeu_ps(void* p, __m512 x) { std::memcpy(p, &x, 64); }
inline void storeu_si512(void* p, __m512i x) { std::memcpy(p, &x, 64); }
// Lanes outside the mask are neither read nor written.
inline __m512 maskz_loadu_ps(uint32_t mask, const void* p) {
    Floats lanes;
    for (int i = 0; i < 16; ++i)
        if (in(mask, i)) std::memcpy(&lanes.x[i], static_cast<const char*>(p) + 4 * i, 4);
    return lanes;
}
inline void mask_storeu_ps(void* p, uint32_t mask, __m512 x) {
    const Floats lanes(x);
    for (int i = 0; i < 16; ++i)
        if (in(mask, i)) std::memcpy(static_cast<char*>(p) + 4 * i, &lanes.x[i], 4);
}
inline void mask_storeu_epi16(void* p, uint32_t mask, __m512i x) {
    const Halves lanes(x);
    for (int i = 0; i < 32; ++i)
        if (in(mask, i)) std::memcpy(static_cast<char*>(p) + 2 * i, &lanes.x[i], 2);
}

inline __m512 add_ps(__m512 a, __m512 b) { return (__m512)((__v16sf)a + (__v16sf)b); }
inline __m512 sub_ps(__m512 a, __m512 b) { return (__m512)((__v16sf)a - (__v16sf)b); }
inline __m512 mul_ps(__m512 a, __m512 b) { return (__m512)((__v16sf)a * (__v16sf)b); }
inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const Floats x(a), y(b), z(c);
    return each<Floats>([&](int i) { return __builtin_fmaf(x.x[i], y.x[i], z.x[i]); });
}
inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) {
    const Floats x(a), y(b), z(c);
    return each<Floats>([&](int i) { return __builtin_fmaf(-x.x[i], y.x[i], z.x[i]); });
}
inline __m512 sqrt_ps(__m512 a) {
    const Floats x(a);
    return each<Floats>([&](int i) { return __builtin_sqrtf(x.x[i]); });
}
// The second operand where either is NaN or both are zeros.
inline __m512 max_ps(__m512 a, __m512 b) {
    const Floats x(a), y(b);
    return each<Floats>([&](int i) { return x.x[i] > y.x[i] ? x.x[i] : y.x[i]; });
}
inline __m512 min_ps(__m512 a, __m512 b) {
    const Floats x(a), y(b);
    return each<Floats>([&](int i) { return x.x[i] < y.x[i] ? x.x[i] : y.x[i]; });
}
// 1 / x to 14 bits: the instruction's error is below 2^-14, and so is that of a quotient cut off there.
inline __m512 rcp14_ps(__m512 a) {
    const Floats x(a);
    return each<Floats>([&](int i) { return bits<float>(bits<uint32_t>(1.0f / x.x[i]) & 0xfffffe00u); });
}
// To whole numbers, ties to even: the only use.
inline __m512 roundscale_ps(__m512 a, int how) {
    if (how != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) __builtin_trap();
    const Floats x(a);
    return each<Floats>([&](int i) { return __builtin_nearbyintf(x.x[i]); });
}
// x 2^floor(y).
inline float scaled(float x, float y) {
    if (std::isnan(x) || std::isnan(y)) return x + y;
    if (std::isinf(y)) return y > 0 ? x * y : (std::isinf(x) ? NAN : std::copysign(0.0f, x));
    return std::scalbn(x, static_cast<int>(std::fmax(-400.0f, std::fmin(400.0f, std::floor(y)))));
}
inline __m512 scalef_ps(__m512 a, __m512 b) {
    const Floats x(a), y(b);
    return each<Floats>([&](int i) { return scaled(x.x[i], y.x[i]); });
}
inline __m512 maskz_scalef_ps(uint32_t mask, __m512 a, __m512 b) {
    const Floats x(a), y(b);
    return each<Floats>([&](int i) { return in(mask, i) ? scaled(x.x[i], y.x[i]) : 0.0f; });
}

inline __m512 mask_mov_ps(__m512 from, uint32_t mask, __m512 a) {
    const Floats x(from), y(a);
    return each<Floats>([&](int i) { return in(mask, i) ? y.x[i] : x.x[i]; });
}
inline __m512 maskz_mov_ps(uint32_t mask, __m512 a) { return mask_mov_ps(setzero_ps(), mask, a); }
inline __m512 mask_max_ps(__m512 from, uint32_t mask, __m512 a, __m512 b) { return mask_mov_ps(from, mask, max_ps(a, b)); }
inline __m512 mask_min_ps(__m512 from, uint32_t mask, __m512 a, __m512 b) { return mask_mov_ps(from, mask, min_ps(a, b)); }
inline __m512i mask_mov_epi16(__m512i from, uint32_t mask, __m512i a) {
    const Halves x(from), y(a);
    return each<Halves>([&](int i) { return in(mask, i) ? y.x[i] : x.x[i]; });
}
inline uint16_t cmp_ps_mask(__m512 a, __m512 b, int how) {
    const Floats x(a), y(b);
    uint16_t mask = 0;
    for (int i = 0; i < 16; ++i) {
        const float p = x.x[i], q = y.x[i];
        bool is = false;
        if (how == _CMP_GT_OQ) is = p > q;
        else if (how == _CMP_EQ_OQ) is = p == q;
        else if (how == _CMP_NLT_UQ) is = !(p < q);
        else if (how == _CMP_UNORD_Q) is = std::isnan(p) || std::isnan(q);
        else __builtin_trap();
        mask |= static_cast<uint16_t>(is << i);
    }
    return mask;
}
inline uint32_t cmpeq_epi16_mask(__m512i a, __m512i b) {
    const Halves x(a), y(b);
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(x.x[i] == y.x[i]) << i;
    return mask;
}
inline uint32_t test_epi16_mask(__m512i a, __m512i b) { return ~cmpeq_epi16_mask(a & b, __m512i{}); }

// Halves, quarters, and so on are added: the order of the compiler's own.
inline float reduce_add_ps(__m512 a) {
    Floats x(a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.x[i] += x.x[i + width];
    return x.x[0];
}
inline float reduce_max_ps(__m512 a) {
    Floats x(a);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) x.x[i] = x.x[i] > x.x[i + width] ? x.x[i] : x.x[i + width];
    return x.x[0];
}
inline int reduce_max_epi32(__m512i a) {
    const Words x(a);
    int highest = x.x[0];
    for (int i = 1; i < 16; ++i) highest = x.x[i] > highest ? x.x[i] : highest;
    return highest;
}
inline float cvtss_f32(__m512 a) { return Floats(a).x[0]; }

inline __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((__v16su)a + (__v16su)b); }
inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i slli_epi32(__m512i a, unsigned n) { return (__m512i)((__v16su)a << n); }
inline __m512i slli_epi16(__m512i a, unsigned n) { return (__m512i)((__v32hu)a << n); }
inline __m512i srai_epi16(__m512i a, unsigned n) { return (__m512i)((__v32hi)a >> n); }
inline __m512i cvtepu16_epi32(__m256i a) {
    const Lanes<uint16_t, __m256i> x(a);
    return each<Words>([&](int i) { return x.x[i]; });
}
inline __m512i cvtepu8_epi16(__m256i a) {
    const Lanes<uint8_t, __m256i> x(a);
    return each<Halves>([&](int i) { return x.x[i]; });
}
inline __m256i castsi512_si256(__m512i a) {
    __m256i low;
    std::memcpy(&low, &a, 32);
    return low;
}
inline __m256i extracti64x4_epi64(__m512i a, int half) {
    __m256i some;
    std::memcpy(&some, reinterpret_cast<const char*>(&a) + 32 * (half & 1), 32);
    return some;
}
inline __m512 cvtph_ps(__m256i a) {
    const Lanes<int64_t, __m256i> x(a);
    Lanes<float, __m256> low(_mm256_cvtph_ps(_mm_set_epi64x(x.x[1], x.x[0])));
    Lanes<float, __m256> high(_mm256_cvtph_ps(_mm_set_epi64x(x.x[3], x.x[2])));
    return each<Floats>([&](int i) { return i < 8 ? low.x[i] : high.x[i - 8]; });
}

// Pieces of `size` bytes from the low or high half of each 128-bit lane of a and b in turns.
template <typename T>
inline __m512i unpack(__m512i a, __m512i b, bool high) {
    const Lanes<T, __m512i> x(a), y(b);
    constexpr int PER_LANE = 16 / sizeof(T);
    return each<Lanes<T, __m512i>>([&](int i) {
        const int from = i / PER_LANE * PER_LANE + i % PER_LANE / 2 + (high ? PER_LANE / 2 : 0);
        return i % 2 ? y.x[from] : x.x[from];
    });
}
inline __m512i unpacklo_epi16(__m512i a, __m512i b) { return unpack<uint16_t>(a, b, false); }
inline __m512i unpackhi_epi16(__m512i a, __m512i b) { return unpack<uint16_t>(a, b, true); }
inline __m512i unpacklo_epi32(__m512i a, __m512i b) { return unpack<uint32_t>(a, b, false); }
inline __m512i unpackhi_epi32(__m512i a, __m512i b) { return unpack<uint32_t>(a, b, true); }
inline __m512i unpacklo_epi64(__m512i a, __m512i b) { return unpack<uint64_t>(a, b, false); }
inline __m512i unpackhi_epi64(__m512i a, __m512i b) { return unpack<uint64_t>(a, b, true); }
inline __m512i shuffle_i32x4(__m512i a, __m512i b, int which) {
    const Words x(a), y(b);
    return each<Words>([&](int i) {
        const int from = (which >> (2 * (i / 4)) & 3) * 4 + i % 4;
        return i < 8 ? x.x[from] : y.x[from];
    });
}
inline __m512 permutex2var_ps(__m512 a, __m512i index, __m512 b) {
    const Floats x(a), y(b);
    const Words from(index);
    return each<Floats>([&](int i) { return from.x[i] & 16 ? y.x[from.x[i] & 15] : x.x[from.x[i] & 15]; });
}
template <typename T>
inline T compressed(uint32_t mask, T lanes) {
    T result;
    for (int i = 0, count = 0; i < T::COUNT; ++i)
        if (in(mask, i)) result.x[count++] = lanes.x[i];
    return result;
}
inline __m512 maskz_compress_ps(uint32_t mask, __m512 a) { return compressed(mask, Floats(a)); }
inline __m512i maskz_compress_epi32(uint32_t mask, __m512i a) { return compressed(mask, Words(a)); }

// To bf16, nearest even whatever the mode; denormals count as zeros.
inline uint16_t bf16(float x) {
    const uint32_t word = bits<uint32_t>(x), magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<uint16_t>(word >> 16 | 0x40u);
    if (magnitude < 0x00800000u) return static_cast<uint16_t>(word >> 16 & 0x8000u);
    return static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}
inline __m512i cvtne2ps_pbh(__m512 high, __m512 low) {
    const Floats x(high), y(low);
    return each<Halves>([&](int i) { return bf16(i < 16 ? y.x[i] : x.x[i - 16]); });
}
inline __m256i cvtneps_pbh(__m512 a) {
    const Floats x(a);
    return each<Lanes<uint16_t, __m256i>>([&](int i) { return bf16(x.x[i]); });
}

}  // namespace
}  // namespace longprefill_emulated

#define _mm512_add_epi32 longprefill_emulated::add_epi32
#define _mm512_add_ps longprefill_emulated::add_ps
#define _mm512_and_si512 longprefill_emulated::and_si512
#define _mm512_castsi512_si256 longprefill_emulated::castsi512_si256
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask longprefill_emulated::cmp_ps_mask
#define _mm512_cmpeq_epi16_mask longprefill_emulated::cmpeq_epi16_mask
#define _mm512_cvtepu16_epi32 longprefill_emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi16 longprefill_emulated::cvtepu8_epi16
#define _mm512_cvtne2ps_pbh longprefill_emulated::cvtne2ps_pbh
#define _mm512_cvtneps_pbh longprefill_emulated::cvtneps_pbh
#define _mm512_cvtph_ps longprefill_emulated::cvtph_ps
#define _mm512_cvtss_f32 longprefill_emulated::cvtss_f32
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 longprefill_emulated::extracti64x4_epi64
#define _mm512_fmadd_ps longprefill_emulated::fmadd_ps
#define _mm512_fnmadd_ps longprefill_emulated::fnmadd_ps
#define _mm512_loadu_ps longprefill_emulated::loadu_ps
#define _mm512_loadu_si512 longprefill_emulated::loadu_si512
#define _mm512_mask_max_ps longprefill_emulated::mask_max_ps
#define _mm512_mask_min_ps longprefill_emulated::mask_min_ps
#define _mm512_mask_mov_epi16 longprefill_emulated::mask_mov_epi16
#define _mm512_mask_mov_ps longprefill_emulated::mask_mov_ps
#define _mm512_mask_storeu_epi16 longprefill_emulated::mask_storeu_epi16
#define _mm512_mask_storeu_ps longprefill_emulated::mask_storeu_ps
#define _mm512_maskz_compress_epi32 longprefill_emulated::maskz_compress_epi32
#define _mm512_maskz_compress_ps longprefill_emulated::maskz_compress_ps
#define _mm512_maskz_loadu_ps longprefill_emulated::maskz_loadu_ps
#define _mm512_maskz_mov_ps longprefill_emulated::maskz_mov_ps
#define _mm512_maskz_scalef_ps longprefill_emulated::maskz_scalef_ps
#define _mm512_max_ps longprefill_emulated::max_ps
#define _mm512_min_ps longprefill_emulated::min_ps
#define _mm512_mul_ps longprefill_emulated::mul_ps
#define _mm512_or_si512 longprefill_emulated::or_si512
#define _mm512_permutex2var_ps longprefill_emulated::permutex2var_ps
#define _mm512_rcp14_ps longprefill_emulated::rcp14_ps
#define _mm512_reduce_add_ps longprefill_emulated::reduce_add_ps
#define _mm512_reduce_max_epi32 longprefill_emulated::reduce_max_epi32
#define _mm512_reduce_max_ps longprefill_emulated::reduce_max_ps
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps longprefill_emulated::roundscale_ps
#define _mm512_scalef_ps longprefill_emulated::scalef_ps
#define _mm512_set1_epi16 longprefill_emulated::set1_epi16
#define _mm512_set1_epi32 longprefill_emulated::set1_epi32
#define _mm512_set1_ps longprefill_emulated::set1_ps
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 longprefill_emulated::setr_epi32
#define _mm512_setzero_ps longprefill_emulated::setzero_ps
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 longprefill_emulated::shuffle_i32x4
#define _mm512_slli_epi16 longprefill_emulated::slli_epi16
#define _mm512_slli_epi32 longprefill_emulated::slli_epi32
#define _mm512_sqrt_ps longprefill_emulated::sqrt_ps
#define _mm512_srai_epi16 longprefill_emulated::srai_epi16
#define _mm512_storeu_ps longprefill_emulated::storeu_ps
#define _mm512_storeu_si512 longprefill_emulated::storeu_si512
#define _mm512_sub_ps longprefill_emulated::sub_ps
#define _mm512_test_epi16_mask longprefill_emulated::test_epi16_mask
#define _mm512_unpackhi_epi16 longprefill_emulated::unpackhi_epi16
#define _mm512_unpackhi_epi32 longprefill_emulated::unpackhi_epi32
#define _mm512_unpackhi_epi64 longprefill_emulated::unpackhi_epi64
#define _mm512_unpacklo_epi16 longprefill_emulated::unpacklo_epi16
#define _mm512_unpacklo_epi32 longprefill_emulated::unpacklo_epi32
#define _mm512_unpacklo_epi64 longprefill_emulated::unpacklo_epi64

#if defined(LONGPREFILL_AMX)
#define __AVX512BF16__ 1

namespace at::native::cpublas {
namespace {

inline float flushed(float x) { return std::abs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// brgemm by the sums of AMX's tiles: 32 products along k at a time, even and odd ones apart, denormals as zeros. B in
// pairs of rows.
inline void emulated_brgemm(int64_t m, int64_t n, int64_t k, int64_t lda, int64_t ldb, int64_t ldc, bool add,
                            const at::BFloat16* a, const at::BFloat16* b, float* c, bool is_vnni) {
    if (!is_vnni) __builtin_trap();
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            float total = add ? flushed(c[i * ldc + j]) : 0.0f;
            for (int64_t begin = 0; begin < k; begin += 32) {
                float sums[2] = {};
                for (int64_t p = begin; p < k && p < begin + 32; ++p)
                    sums[p % 2] += flushed(a[i * lda + p]) * flushed(b[p / 2 * ldb * 2 + j * 2 + p % 2]);
                total += sums[0] + sums[1];
            }
            c[i * ldc + j] = flushed(total);
        }
}
inline bool emulated_could_pack(at::ScalarType) { return true; }
inline void emulated_brgemm_release(bool) {}

}  // namespace
}  // namespace at::native::cpublas

#define brgemm emulated_brgemm
#define could_pack emulated_could_pack
#define brgemm_release emulated_brgemm_release
#endif
