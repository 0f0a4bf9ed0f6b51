// Codecs of the quantized row formats, bit for bit those of formats.py (README.md has the rules).
#include <algorithm>

#include "longprefill/rows.h"

namespace longprefill {
namespace {

constexpr float E4M3_MAX = 448.0f;
constexpr int32_t INFINITE = 0x7f800000;  // bits: what is not below has no finite value
constexpr uint8_t NAN_CODE = 0x7f;
constexpr int64_t GRAIN_BYTES = 1 << 16;  // least work of a thread

// Nearest E4M3 codes, ties to even, of numbers in [-448, 448].
LP_INLINE UintVec e4m3_codes(Vec x) {
    const UintVec bits = (UintVec)absolute(x), sign = ((UintVec)x & 0x80000000u) >> 24;
    const UintVec normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
    const UintVec subnormal = (UintVec)(absolute(x) + 16384.0f) - 0x46800000u;  // steps of 2^-9 end at 2^14's last bit
    return ((IntVec)bits < 0x3c800000 ? subnormal : normal) | sign;  // 2^-6
}

LP_INLINE Vec clamped(Vec x) {
    return x > E4M3_MAX ? splat(E4M3_MAX) : (x < -E4M3_MAX ? splat(-E4M3_MAX) : x);
}

LP_INLINE void store_codes(uint8_t* to, UintVec codes, int count) {
    const ByteVec bytes = __builtin_convertvector(codes, ByteVec);
    if (count == LANES) *reinterpret_cast<UnalignedByteVec*>(to) = bytes;
    else std::memcpy(to, &bytes, count);
}

// Bits of the largest magnitude; NaN is above infinity.
template <typename T>
LP_INLINE int32_t largest_bits(const T* x, int64_t size) {
    IntVec most{};
    for_each_vector(size, [&](int64_t i, int count) {
        const IntVec bits = (IntVec)absolute(load_some(x + i, count));
        most = bits > most ? bits : most;
    });
    int32_t result = 0;
    for (int lane = 0; lane < LANES; ++lane) result = std::max<int32_t>(result, most[lane]);
    return result;
}

template <bool UP, typename T>
void encode_mxfp8_row(const T* x, int64_t width, uint8_t* out) {
    for (int64_t group = 0; group * MX_GROUP < width; ++group) {
        const int64_t begin = group * MX_GROUP, size = std::min(MX_GROUP, width - begin);
        const int32_t amax = largest_bits(x + begin, size);
        if (amax >= INFINITE) {
            std::fill_n(out + begin, size, NAN_CODE);
            out[width + group] = 0xff;
            continue;
        }
        const int32_t exponent = std::max(0, (amax >> 23) - 8 + (UP && (amax & 0x7fffff) > 0x600000));
        const Vec reciprocal = splat(float_of(static_cast<uint32_t>(254 - exponent) << 23));
        for_each_vector(size, [&](int64_t i, int count) {
            store_codes(out + begin + i, e4m3_codes(clamped(load_some(x + begin + i, count) * reciprocal)), count);
        });
        out[width + group] = static_cast<uint8_t>(exponent);
    }
}

// x / scale, correctly rounded. Where it is safe, by the reciprocal and one correction of the remainder, which a fused
// multiply-add keeps exact: a quarter of a division's time.
struct Quotient {
    float scale, reciprocal;
    explicit Quotient(float scale_) : scale(scale_), reciprocal(1.0f / scale_) {}
    LP_INLINE bool is_safe() const { return scale > 0x1p-80f; }
    template <bool SAFE>
    LP_INLINE Vec of(Vec x) const {
#if defined(__AVX512F__)
        if constexpr (SAFE) {
            const __m512 r = _mm512_set1_ps(reciprocal), q = _mm512_mul_ps((__m512)x, r);
            const __m512 rest = _mm512_fnmadd_ps(q, _mm512_set1_ps(scale), (__m512)x);
            const __m512 better = _mm512_fmadd_ps(rest, r, q);
            return (Vec)_mm512_or_ps(better, _mm512_and_ps((__m512)x, _mm512_set1_ps(-0.0f)));  // -0 + 0 is 0
        }
#endif
        return x / splat(scale);
    }
};

template <bool SAFE, typename T>
LP_INLINE void encode_tile(const T* x, int64_t size, Quotient quotient, uint8_t* out) {
    for_each_vector(size, [&](int64_t i, int count) {
        store_codes(out + i, e4m3_codes(clamped(quotient.of<SAFE>(load_some(x + i, count)))), count);
    });
}

template <typename T>
void encode_fp8_row(const T* x, int64_t rank, int64_t rope, uint8_t* out) {
    const int64_t num_tiles = (rank + LATENT_TILE - 1) / LATENT_TILE;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t begin = tile * LATENT_TILE, size = std::min(LATENT_TILE, rank - begin);
        const int32_t amax = largest_bits(x + begin, size);
        float scale = std::max(float_of(static_cast<uint32_t>(amax)) / E4M3_MAX, 0x1p-126f);
        if (amax >= INFINITE) {
            scale = float_of(0x7fc00000u);
            std::fill_n(out + begin, size, NAN_CODE);
        } else if (const Quotient quotient(scale); quotient.is_safe()) {
            encode_tile<true>(x + begin, size, quotient, out + begin);
        } else {
            encode_tile<false>(x + begin, size, quotient, out + begin);
        }
        std::memcpy(out + rank + 4 * tile, &scale, 4);
    }
    auto* tail = reinterpret_cast<c10::BFloat16*>(out + rank + 4 * num_tiles);
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
