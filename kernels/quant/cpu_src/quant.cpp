// Codecs of the quantized row formats, bit for bit those of formats.py (README.md has the rules).
#include <algorithm>

#include "longprefill/rows.h"

namespace longprefill {
namespace {

constexpr float E4M3_MAX = 448.0f;
constexpr int32_t INFINITE = 0x7f800000;  // bits: what is not below has no finite value
constexpr uint8_t NAN_CODE = 0x7f;
constexpr int64_t GRAIN_BYTES = 1 << 16;  // least work of a thread

// E4M3 codes nearest to `size`, ties to even, with the signs of x. CAP: what rounds to more than 448 becomes 448.
template <bool CAP>
LP_INLINE UintVec e4m3_codes(Vec size, Vec x) {
    const UintVec bits = (UintVec)size;
    const UintVec normal = (bits + ((bits >> 20) & 1u) + (0x7ffffu - (120u << 23))) >> 20;
    const UintVec subnormal = (UintVec)(size + 16384.0f) - 0x46800000u;   // steps of 2^-9 end at 2^14's last bit
    const UintVec code = (IntVec)bits < 0x3c800000 ? subnormal : normal;  // 2^-6
    return (CAP ? ((IntVec)code > 0x7e ? UintVec{} + 0x7eu : code) : code) | (((UintVec)x >> 24) & 0x80u);
}

LP_INLINE Vec load_numbers(const float* from) { return load(from); }
LP_INLINE Vec load_numbers(const c10::BFloat16* from) {
#if defined(__AVX512F__)
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);  // gcc widens the two halves apart
#else
    return load(from);
#endif
}

LP_INLINE void store_codes(uint8_t* to, UintVec codes, int count) {
    const ByteVec bytes = __builtin_convertvector(codes, ByteVec);
    if (count == LANES) *reinterpret_cast<UnalignedByteVec*>(to) = bytes;
    else std::memcpy(to, &bytes, count);
}

LP_INLINE int32_t largest_lane(IntVec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#elif defined(__AVX2__)
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    int32_t result = x[0];
    for (int lane = 1; lane < LANES; ++lane) result = std::max<int32_t>(result, x[lane]);
    return result;
#endif
}

#if defined(__AVX2__)
typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));  // the bits of 2 LANES numbers in bf16
typedef int16_t UnalignedShorts __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef int16_t EightShorts __attribute__((vector_size(16)));
constexpr int SHORTS = 2 * LANES;

LP_INLINE Shorts magnitudes(const c10::BFloat16* from) {
    return *reinterpret_cast<const UnalignedShorts*>(from) & int16_t{0x7fff};
}
LP_INLINE EightShorts larger(EightShorts a, EightShorts b) { return a > b ? a : b; }

// The largest of the magnitudes of `size` numbers, a multiple of SHORTS, as the bits of bf16: NaN is above infinity.
LP_INLINE int32_t largest_magnitude(const c10::BFloat16* from, int64_t size) {
    Shorts most = magnitudes(from);
    for (int64_t i = SHORTS; i < size; i += SHORTS) {
        const Shorts some = magnitudes(from + i);
        most = some > most ? some : most;
    }
    EightShorts parts[SHORTS / 8];
    std::memcpy(parts, &most, sizeof(parts));
#pragma GCC unroll 2
    for (int width = SHORTS / 16; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) parts[i] = larger(parts[i], parts[i + width]);
    EightShorts x = parts[0];
    x = larger(x, __builtin_shuffle(x, EightShorts{4, 5, 6, 7, 0, 1, 2, 3}));
    x = larger(x, __builtin_shuffle(x, EightShorts{2, 3, 0, 1, 6, 7, 4, 5}));
    return std::max<int32_t>(x[0], x[1]);
}

LP_INLINE bool any_lane(Shorts is) {
#if defined(__AVX512BW__)
    return _mm512_test_epi16_mask((__m512i)is, (__m512i)is) != 0;
#else
    return _mm256_movemask_epi8((__m256i)is) != 0;
#endif
}

// A whole group of bf16 with the exponent of its scale, in lanes of 16 bits: a power of two leaves seven bits of mantissa,
// so the code's rounding is the only one. False and nothing of use in `out` where a code would be subnormal.
template <bool CAP>
LP_INLINE bool store_codes_of_words(const c10::BFloat16* from, int32_t exponent, uint8_t* out) {
    if (exponent < 10) return false;  // or zeros and denormals would pass for larger numbers
    const int16_t bias = static_cast<int16_t>((exponent - 7) << 7);
    Shorts codes[MX_GROUP / SHORTS], is_subnormal{};
#pragma GCC unroll 2
    for (int n = 0; n < MX_GROUP / SHORTS; ++n) {
        const Shorts x = *reinterpret_cast<const UnalignedShorts*>(from + n * SHORTS);
        const Shorts scaled = (x & int16_t{0x7fff}) - bias;  // 128 to 255: the least normal binade
        Shorts code = (scaled + ((scaled >> 4) & int16_t{1}) + int16_t{7}) >> 4;
        if (CAP) code = code > int16_t{0x7e} ? Shorts{} + int16_t{0x7e} : code;
        const Shorts is_below = scaled < int16_t{128};
        is_subnormal |= is_below & (scaled > int16_t{-384});  // up to half of the least subnormal they are 0
        codes[n] = (code & ~is_below) | ((x >> 8) & int16_t{0x80});
    }
    if (__builtin_expect(any_lane(is_subnormal), false)) return false;
#if defined(__AVX512BW__)
    typedef uint8_t Bytes __attribute__((vector_size(SHORTS)));
    const Bytes bytes = __builtin_convertvector(codes[0], Bytes);
    std::memcpy(out, &bytes, sizeof(bytes));
#else
    const __m256i both = _mm256_packus_epi16((__m256i)codes[0], (__m256i)codes[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(both, 0xd8));
#endif
    return true;
}
#endif

// Up to SIZE numbers that share a scale, in registers where there are enough.
template <int SIZE>
struct Group {
    static constexpr int VECTORS = SIZE / LANES;
    Vec x[VECTORS];

    template <typename T>
    LP_INLINE Group(const T* from, int64_t size) {
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n)
            x[n] = size == SIZE ? load_numbers(from + n * LANES) : load_some(from + n * LANES, present(n, size));
    }
    LP_INLINE static int present(int n, int64_t size) {
        return static_cast<int>(std::min<int64_t>(LANES, std::max<int64_t>(0, size - n * LANES)));
    }
    // Bits of the largest magnitude of the same numbers: NaN is above infinity.
    template <typename T>
    LP_INLINE int32_t largest_bits([[maybe_unused]] const T* from, [[maybe_unused]] int64_t size) const {
#if defined(__AVX2__)
        if constexpr (std::is_same_v<T, c10::BFloat16>)
            if (size == SIZE) return largest_magnitude(from, SIZE) << 16;
#endif
        IntVec most{};
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n) {
            const IntVec bits = (IntVec)absolute(x[n]);
            most = bits > most ? bits : most;
        }
        return largest_lane(most);
    }
    // `scaled` is given magnitudes.
    template <bool CAP, typename Scaled>
    LP_INLINE void store_as_codes(uint8_t* to, int64_t size, Scaled scaled) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
        if (size == SIZE) {  // four vectors of codes to 32 bytes: gcc narrows lane by lane
#pragma GCC unroll 8
            for (int n = 0; n < VECTORS; n += 4) {
                __m256i codes[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) codes[i] = (__m256i)e4m3_codes<CAP>(scaled(absolute(x[n + i])), x[n + i]);
                const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]),
                                                          _mm256_packus_epi32(codes[2], codes[3]));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + n * LANES),
                                    _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
            }
            return;
        }
#endif
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; ++n)
            store_codes(to + n * LANES, e4m3_codes<CAP>(scaled(absolute(x[n])), x[n]),
                        size == SIZE ? LANES : present(n, size));
    }
};

template <bool UP, typename T>
LP_INLINE uint8_t encode_mxfp8_group(const T* x, int64_t size, uint8_t* out) {
    const Group<MX_GROUP> group(x, size);
    const int32_t amax = group.largest_bits(x, size);
    if (__builtin_expect(amax >= INFINITE, false)) {
        std::fill_n(out, size, NAN_CODE);
        return 0xff;
    }
    const int32_t exponent = std::max(0, (amax >> 23) - 8 + (UP && (amax & 0x7fffff) > 0x600000));
#if defined(__AVX2__)
    if constexpr (std::is_same_v<T, c10::BFloat16>)
        if (size == MX_GROUP && store_codes_of_words<!UP>(x, exponent, out)) return static_cast<uint8_t>(exponent);
#endif
    const Vec reciprocal = splat(float_of(static_cast<uint32_t>(254 - exponent) << 23));
    group.template store_as_codes<!UP>(out, size, [&](Vec number) { return number * reciprocal; });
    return static_cast<uint8_t>(exponent);
}

template <bool UP, typename T>
void encode_mxfp8_row(const T* x, int64_t width, uint8_t* out) {
    const int64_t whole = width / MX_GROUP, rest = width - whole * MX_GROUP;
    for (int64_t group = 0; group < whole; ++group)
        out[width + group] = encode_mxfp8_group<UP>(x + group * MX_GROUP, MX_GROUP, out + group * MX_GROUP);
    if (rest) out[width + whole] = encode_mxfp8_group<UP>(x + whole * MX_GROUP, rest, out + whole * MX_GROUP);
}

// x / scale, correctly rounded. Where a fused multiply-add keeps the remainder exact, by the reciprocal and one
// correction: a quarter of a division's time.
struct Quotient {
    Vec scale, reciprocal;
    bool is_exact;
    LP_INLINE explicit Quotient(float by) : scale(splat(by)), reciprocal(splat(1.0f / by)), is_exact(by > 0x1p-80f) {}
    LP_INLINE Vec operator()(Vec x) const {  // x >= 0
#if defined(__AVX512F__)
        if (is_exact) {
            const __m512 r = (__m512)reciprocal, q = _mm512_mul_ps((__m512)x, r);
            return (Vec)_mm512_fmadd_ps(_mm512_fnmadd_ps(q, (__m512)scale, (__m512)x), r, q);
        }
#elif defined(__AVX2__) && defined(__FMA__)
        if (is_exact) {
            const __m256 r = (__m256)reciprocal, q = _mm256_mul_ps((__m256)x, r);
            return (Vec)_mm256_fmadd_ps(_mm256_fnmadd_ps(q, (__m256)scale, (__m256)x), r, q);
        }
#endif
        return x / scale;
    }
};

// NaN where a number of the tile is not finite.
template <typename T>
LP_INLINE float scale_of_tile(const T* x, int64_t size) {
    const int32_t amax = Group<LATENT_TILE>(x, size).largest_bits(x, size);
    if (__builtin_expect(amax >= INFINITE, false)) return float_of(0x7fc00000u);
    return std::max(float_of(static_cast<uint32_t>(amax)) / E4M3_MAX, 0x1p-126f);
}

template <typename T>
LP_INLINE void encode_tile(const T* x, int64_t size, float scale, uint8_t* out) {
    if (__builtin_expect(scale != scale, false)) std::fill_n(out, size, NAN_CODE);
    else Group<LATENT_TILE>(x, size).template store_as_codes<false>(out, size, Quotient(scale));
}

template <typename T>
void encode_fp8_row(const T* x, int64_t rank, int64_t rope, uint8_t* out) {
    const int64_t whole = rank / LATENT_TILE, rest = rank - whole * LATENT_TILE;
    uint8_t* scales = out + rank;
    const auto store_scale = [&](int64_t tile, float scale) { std::memcpy(scales + 4 * tile, &scale, 4); };
    const auto stored_scale = [&](int64_t tile) {
        float scale;
        std::memcpy(&scale, scales + 4 * tile, 4);
        return scale;
    };
    // All scales first: a tile's maximum and its two divisions take longer than there is work of one tile to hide them.
    for (int64_t tile = 0; tile < whole; ++tile) store_scale(tile, scale_of_tile(x + tile * LATENT_TILE, LATENT_TILE));
    if (rest) store_scale(whole, scale_of_tile(x + whole * LATENT_TILE, rest));
    for (int64_t tile = 0; tile < whole; ++tile)
        encode_tile(x + tile * LATENT_TILE, LATENT_TILE, stored_scale(tile), out + tile * LATENT_TILE);
    if (rest) encode_tile(x + whole * LATENT_TILE, rest, stored_scale(whole), out + whole * LATENT_TILE);
    auto* tail = reinterpret_cast<c10::BFloat16*>(scales + 4 * (whole + (rest > 0)));
    for_each_vector(rope, [&](int64_t i, int count) { store_some(tail + i, load_some(x + rank + i, count), count); });
}

template <typename Body>
void for_rows(int64_t num_rows, int64_t bytes, Body body) {
    at::parallel_for(0, num_rows, std::max<int64_t>(1, GRAIN_BYTES / std::max<int64_t>(1, bytes)),
                     [&](int64_t first, int64_t last) {
                         for (int64_t row = first; row < last; ++row) body(row);
                     });
}

// uint8 [T, W + groups].
at::Tensor quant_encode_mxfp8(const at::Tensor& x, bool up) {
    check_dim(x, "rows", 2), check_rows_contiguous(x, "rows");
    const int64_t width = x.size(1), row_bytes = bytes_of_row(RowFormat::mxfp8, width, width), stride = x.stride(0);
    at::Tensor out = at::empty({x.size(0), row_bytes}, x.options().dtype(at::kByte));
    uint8_t* to = out.mutable_data_ptr<uint8_t>();
    for_float_type(x, "rows", [&](auto* type) {
        const auto* from = x.const_data_ptr<std::remove_pointer_t<decltype(type)>>();
        for_rows(x.size(0), row_bytes, [&](int64_t row) {
            if (up) encode_mxfp8_row<true>(from + row * stride, width, to + row * row_bytes);
            else encode_mxfp8_row<false>(from + row * stride, width, to + row * row_bytes);
        });
    });
    return out;
}

// uint8 [T, rank + 4 tiles + 2 rope].
at::Tensor quant_encode_fp8(const at::Tensor& x, int64_t rank) {
    check_dim(x, "rows", 2), check_rows_contiguous(x, "rows");
    const int64_t rope = x.size(1) - rank, stride = x.stride(0);
    const int64_t row_bytes = bytes_of_row(RowFormat::fp8_latent, x.size(1), rank);
    at::Tensor out = at::empty({x.size(0), row_bytes}, x.options().dtype(at::kByte));
    uint8_t* to = out.mutable_data_ptr<uint8_t>();
    for_float_type(x, "rows", [&](auto* type) {
        const auto* from = x.const_data_ptr<std::remove_pointer_t<decltype(type)>>();
        for_rows(x.size(0), row_bytes,
                 [&](int64_t row) { encode_fp8_row(from + row * stride, rank, rope, to + row * row_bytes); });
    });
    return out;
}

// [T, W] fp32, or bf16 if asked for; `rank` is W for MXFP8 rows.
at::Tensor quant_decode(const at::Tensor& bytes, int64_t format, int64_t width, int64_t rank, bool is_bf16) {
    check_rows_contiguous(bytes, "bytes");
    check_shape(bytes, "bytes", {bytes.size(0), bytes_of_row(static_cast<RowFormat>(format), width, rank)});
    at::Tensor out = at::empty({bytes.size(0), width}, bytes.options().dtype(is_bf16 ? at::kBFloat16 : at::kFloat));
    const uint8_t* from = bytes.const_data_ptr<uint8_t>();
    const int64_t stride = bytes.stride(0);
    for_float_type(out, "rows", [&](auto* type) {
        auto* to = out.mutable_data_ptr<std::remove_pointer_t<decltype(type)>>();
        for_rows(bytes.size(0), bytes.size(1), [&](int64_t row) {
            if (static_cast<RowFormat>(format) == RowFormat::mxfp8)
                decode_mxfp8_row(from + row * stride, width, to + row * width);
            else
                decode_fp8_row(from + row * stride, rank, width - rank, to + row * width);
        });
    });
    return out;
}

LONGPREFILL_OPS(quant, m) {
    m.def("quant_encode_mxfp8(Tensor x, bool up) -> Tensor", TORCH_FN(quant_encode_mxfp8));
    m.def("quant_encode_fp8(Tensor x, int rank) -> Tensor", TORCH_FN(quant_encode_fp8));
    m.def("quant_decode(Tensor bytes, int format, int width, int rank, bool is_bf16) -> Tensor", TORCH_FN(quant_decode));
}

}  // namespace
}  // namespace longprefill
