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
    // Bits of the largest magnitude: NaN is above infinity.
    LP_INLINE int32_t largest_bits() const {
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
    const int32_t amax = group.largest_bits();
    if (__builtin_expect(amax >= INFINITE, false)) {
        std::fill_n(out, size, NAN_CODE);
        return 0xff;
    }
    const int32_t exponent = std::max(0, (amax >> 23) - 8 + (UP && (amax & 0x7fffff) > 0x600000));
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

template <typename T>
LP_INLINE float encode_tile(const T* x, int64_t size, uint8_t* out) {
    const Group<LATENT_TILE> tile(x, size);
    const int32_t amax = tile.largest_bits();
    if (__builtin_expect(amax >= INFINITE, false)) {
        std::fill_n(out, size, NAN_CODE);
        return float_of(0x7fc00000u);
    }
    const float scale = std::max(float_of(static_cast<uint32_t>(amax)) / E4M3_MAX, 0x1p-126f);
    tile.template store_as_codes<false>(out, size, Quotient(scale));
    return scale;
}

template <typename T>
void encode_fp8_row(const T* x, int64_t rank, int64_t rope, uint8_t* out) {
    const int64_t whole = rank / LATENT_TILE, rest = rank - whole * LATENT_TILE;
    uint8_t* scales = out + rank;
    for (int64_t tile = 0; tile < whole; ++tile, scales += 4) {
        const float scale = encode_tile(x + tile * LATENT_TILE, LATENT_TILE, out + tile * LATENT_TILE);
        std::memcpy(scales, &scale, 4);
    }
    if (rest) {
        const float scale = encode_tile(x + whole * LATENT_TILE, rest, out + whole * LATENT_TILE);
        std::memcpy(scales, &scale, 4);
        scales += 4;
    }
    auto* tail = reinterpret_cast<c10::BFloat16*>(scales);
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
    check_rows_contiguous(x, "rows");
    const int64_t width = x.size(1), row_bytes = width + (width + MX_GROUP - 1) / MX_GROUP, stride = x.stride(0);
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
    check_rows_contiguous(x, "rows");
    const int64_t rope = x.size(1) - rank, stride = x.stride(0);
    const int64_t row_bytes = rank + (rank + LATENT_TILE - 1) / LATENT_TILE * 4 + 2 * rope;
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
