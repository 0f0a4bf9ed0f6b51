// Cache rows in pages and their formats (kernels/quant/README.md): how the kernels read one row.
#pragma once

#include <type_traits>

#include "longprefill/torch.h"

namespace longprefill {
namespace {

enum class RowFormat : int64_t { fp32 = 0, bf16 = 1, fp8_latent = 2, mxfp8 = 3 };  // kernels/quant/cpu.py: CODES

constexpr int64_t MX_GROUP = 32, LATENT_TILE = 128;

typedef uint8_t ByteVec __attribute__((vector_size(LANES)));
typedef uint8_t UnalignedByteVec __attribute__((vector_size(LANES), aligned(1), may_alias));

LP_INLINE float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
LP_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// LANES E4M3 codes to numbers, all 256 exactly; 0x7f and 0xff are NaN.
LP_INLINE Vec e4m3_numbers(UintVec codes) {
    const UintVec magnitude = codes & 0x7fu;
    const Vec normal = (Vec)((magnitude << 20) + (120u << 23));
    const Vec subnormal = (Vec)((magnitude << 20) + (121u << 23)) - 0.015625f;  // m / 8 * 2^-6 as (1 + m / 8 - 1) 2^-6
    const Vec finite = (IntVec)magnitude < 8 ? subnormal : normal;
    const UintVec value = (IntVec)magnitude == 0x7f ? UintVec{} + 0x7fc00000u : (UintVec)finite;
    return (Vec)(value | (codes & 0x80u) << 24);
}
LP_INLINE UintVec load_bytes(const uint8_t* p) {
    return __builtin_convertvector(*reinterpret_cast<const UnalignedByteVec*>(p), UintVec);
}
LP_INLINE UintVec load_bytes(const uint8_t* p, int count) {
    if (count == LANES) return load_bytes(p);
    uint8_t some[LANES] = {};
    std::memcpy(some, p, count);
    return load_bytes(some);
}

// E8M0: 2^(byte - 127), NaN for 255.
LP_INLINE float e8m0_number(uint8_t byte) {
    return float_of(byte == 0 ? 0x00400000u : (byte == 255 ? 0x7fc00000u : uint32_t{byte} << 23));
}

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__F16C__) && !defined(__AVX512F__))
#define LONGPREFILL_CODES_THROUGH_FP16

// 2 LANES codes through fp16: a code's bits with another exponent bias are the fp16 number 2^-8 as large, NaN apart.
LP_INLINE void e4m3_numbers(const uint8_t* codes, Vec factor, Vec& low, Vec& high) {
#if defined(__AVX512BW__)
    const __m512i words =
        _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes))), 8);
    const __m512i halves = _mm512_and_si512(_mm512_srai_epi16(words, 1), _mm512_set1_epi16(-0x4001));
    const __m512i nan = _mm512_set1_epi16(0x7f00);
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, nan), nan);
    const __m512i marked = _mm512_mask_mov_epi16(halves, is_nan, nan);
    low = (Vec)_mm512_cvtph_ps(_mm512_castsi512_si256(marked)) * factor;
    high = (Vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(marked, 1)) * factor;
#else
    const __m256i words =
        _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))), 8);
    const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(-0x4001));
    const __m256i nan = _mm256_set1_epi16(0x7f00);
    const __m256i marked = _mm256_blendv_epi8(halves, nan, _mm256_cmpeq_epi16(_mm256_and_si256(words, nan), nan));
    low = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(marked)) * factor;
    high = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(marked, 1)) * factor;
#endif
}

LP_INLINE void store_pair(float* to, Vec low, Vec high) { store(to, low), store(to + LANES, high); }
LP_INLINE void store_pair(c10::BFloat16* to, Vec low, Vec high) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
#elif !defined(__AVX512F__)
    const __m256i both = _mm256_packus_epi32((__m256i)bf16_bits(low), (__m256i)bf16_bits(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(both, 0xd8));
#else
    store(to, low), store(to + LANES, high);
#endif
}
#endif

// code * scale for `size` codes.
template <typename T>
LP_INLINE void decode_codes(const uint8_t* codes, int64_t size, float scale, T* out) {
    int64_t begin = 0;
#if defined(LONGPREFILL_CODES_THROUGH_FP16)
    // Where 2^8 scale is finite and no product is denormal: the conversion to bf16 would make 0 of those.
    if (scale >= 0x1p-116f && scale < 0x1p119f)
        for (; begin + 2 * LANES <= size; begin += 2 * LANES) {
            Vec low, high;
            e4m3_numbers(codes + begin, splat(scale * 256.0f), low, high);
            store_pair(out + begin, low, high);
        }
#endif
    for_each_vector(size - begin, [&](int64_t i, int count) {
        store_some(out + begin + i, e4m3_numbers(load_bytes(codes + begin + i, count)) * splat(scale), count);
    });
}

// Numbers [0, width) of an MXFP8 row [codes | one scale a group].
template <typename T>
LP_INLINE void decode_mxfp8_row(const uint8_t* bytes, int64_t width, T* out) {
    const int64_t whole = width / MX_GROUP;
    for (int64_t group = 0; group < whole; ++group)  // its own loop: the size is known to the compiler
        decode_codes(bytes + group * MX_GROUP, MX_GROUP, e8m0_number(bytes[width + group]), out + group * MX_GROUP);
    const int64_t rest = width - whole * MX_GROUP;
    if (rest) decode_codes(bytes + whole * MX_GROUP, rest, e8m0_number(bytes[width + whole]), out + whole * MX_GROUP);
}

// Numbers of an FP8 latent row [rank codes | fp32 scale a tile | rope in bf16].
template <typename T>
LP_INLINE void decode_fp8_row(const uint8_t* bytes, int64_t rank, int64_t rope, T* out) {
    const int64_t num_tiles = (rank + LATENT_TILE - 1) / LATENT_TILE;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        float scale;
        std::memcpy(&scale, bytes + rank + 4 * tile, 4);
        const int64_t begin = tile * LATENT_TILE, size = rank - begin < LATENT_TILE ? rank - begin : LATENT_TILE;
        decode_codes(bytes + begin, size, scale, out + begin);
    }
    const auto* tail = reinterpret_cast<const c10::BFloat16*>(bytes + rank + 4 * num_tiles);
    if constexpr (std::is_same_v<T, c10::BFloat16>) std::memcpy(static_cast<void*>(out + rank), tail, rope * sizeof(T));
    else
        for_each_vector(rope, [&](int64_t i, int count) { store_some(out + rank + i, load_some(tail + i, count), count); });
}

// Bytes of a row of `width` numbers, the first `rank` of which are FP8 codes in a latent row.
inline int64_t bytes_of_row(RowFormat format, int64_t width, int64_t rank) {
    switch (format) {
        case RowFormat::fp32: return 4 * width;
        case RowFormat::bf16: return 2 * width;
        case RowFormat::fp8_latent:
            TORCH_CHECK_VALUE(rank >= 0 && rank <= width, "latent rank ", rank, " of rows of ", width,
                              " numbers: must be 0 to ", width);
            return rank + (rank + LATENT_TILE - 1) / LATENT_TILE * 4 + 2 * (width - rank);
        case RowFormat::mxfp8: return width + (width + MX_GROUP - 1) / MX_GROUP;
    }
    TORCH_CHECK_VALUE(false, "row format ", static_cast<int64_t>(format), ": must be 0 to 3 (kernels/quant/cpu.py)");
}

// Rows of one job in the pages of a pool: uint8 [pages, rows a page, row bytes] and the physical page of each logical one.
struct Rows {
    const uint8_t* data;
    const int64_t* table;
    int64_t page_stride, page_rows, row_bytes, num_rows, width, rank;
    RowFormat format;

    Rows(const at::Tensor& pages, const at::Tensor& table_, int64_t num_rows_, int64_t width_, int64_t rank_,
         int64_t format_)
        : data(pages.const_data_ptr<uint8_t>()), table(table_.const_data_ptr<int64_t>()),
          page_stride(pages.stride(0)), page_rows(pages.size(1)), row_bytes(pages.size(2)), num_rows(num_rows_),
          width(width_), rank(rank_), format(static_cast<RowFormat>(format_)) {
        check_dim(pages, "pages", 3), check_rows_contiguous(pages, "pages"), check_contiguous(table_, "table");
        TORCH_CHECK_VALUE(row_bytes == bytes_of_row(format, width, rank), "rows of ", row_bytes, " bytes in pages ",
                          pages.sizes(), ": ", width, " numbers in this format take ", bytes_of_row(format, width, rank));
        TORCH_CHECK_VALUE(num_rows >= 0 && num_rows <= table_.numel() * page_rows, num_rows, " rows on ", table_.numel(),
                          " pages of ", page_rows, " rows: must be 0 to ", table_.numel() * page_rows);
        const int64_t num_pages = num_rows ? (num_rows + page_rows - 1) / page_rows : 0, pool = pages.size(0);
        const auto is_inside = [&](int64_t i) { return static_cast<uint64_t>(table[i]) < static_cast<uint64_t>(pool); };
        bool are_inside = true;
        for (int64_t i = 0; i < num_pages; ++i) are_inside &= is_inside(i);
        for (int64_t i = 0; !are_inside && i < num_pages; ++i)
            TORCH_CHECK_INDEX(is_inside(i), "page ", i, " of the table is ", table[i], ": the pool has pages 0 to ",
                              pool - 1);
    }

    LP_INLINE const uint8_t* row(int64_t position) const {
        return data + table[position / page_rows] * page_stride + position % page_rows * row_bytes;
    }

    template <typename T>
    LP_INLINE void decode(int64_t position, T* out) const {
        const uint8_t* bytes = row(position);
        switch (format) {
            case RowFormat::fp32: return copy(reinterpret_cast<const float*>(bytes), out);
            case RowFormat::bf16: return copy(reinterpret_cast<const c10::BFloat16*>(bytes), out);
            case RowFormat::fp8_latent: return decode_fp8_row(bytes, rank, width - rank, out);
            case RowFormat::mxfp8: return decode_mxfp8_row(bytes, width, out);
        }
    }

private:
    template <typename From, typename T>
    LP_INLINE void copy(const From* from, T* out) const {
        for_each_vector(width, [&](int64_t i, int count) { store_some(out + i, load_some(from + i, count), count); });
    }
};

}  // namespace
}  // namespace longprefill
