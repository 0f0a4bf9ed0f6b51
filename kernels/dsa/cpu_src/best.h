// The running best `places` scores of one query, fed in ascending position.
#pragma once

#include <algorithm>

#include "longprefill/vector.h"

namespace longprefill {
namespace {

// Order of fp32 numbers as integers; no NaN comes here.
LP_INLINE int64_t rank_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
LP_INLINE float number_of_rank(int64_t rank) {
    const int32_t bits = static_cast<int32_t>(rank < 0 ? rank ^ 0x7fffffff : rank);
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Candidates lie in ascending position. Until the buffer is full once everything enters; from then on only what beats
// the list's worst score strictly: on a tie the listed key has the lower position.
struct Best {
    float* scores;       // capacity + LANES
    int32_t* positions;  // capacity + LANES
    int64_t count = 0;
    float threshold = 0;
    bool is_open = true;

    static int64_t capacity(int64_t places, int64_t block) { return places + std::max(places, block); }

    // Scores of `size` keys from position `begin`; at most `block` of them. `row` is padded to LANES and is changed.
    LP_INLINE void push(float* row, int64_t size, int64_t begin, int64_t places, int64_t block) {
        if (count + size > capacity(places, block)) cut(places);
        for (int64_t i = size; i % LANES; ++i) row[i] = -std::numeric_limits<float>::infinity();
        const Vec lowest = splat(-std::numeric_limits<float>::infinity());
        if (is_open) {
            for (int64_t i = 0; i < size; i += LANES) {
                const Vec x = load(row + i);
                store(scores + count + i, (x == x ? x : lowest) + 0.0f);
            }
            for (int64_t i = 0; i < size; ++i) positions[count + i] = static_cast<int32_t>(begin + i);
            count += size;
            return;
        }
        const Vec worst = splat(threshold);
#if defined(__AVX512F__)
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int64_t i = 0; i < size; i += LANES) {
            const Vec x = load(row + i);
            const __mmask16 enters = _mm512_cmp_ps_mask((__m512)x, (__m512)worst, _CMP_GT_OQ);
            if (!enters) continue;
            const __m512i places_ = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(begin + i)));
            _mm512_storeu_ps(scores + count, _mm512_maskz_compress_ps(enters, (__m512)x));
            _mm512_storeu_si512(positions + count, _mm512_maskz_compress_epi32(enters, places_));
            count += __builtin_popcount(enters);
        }
#else
        for (int64_t i = 0; i < size; i += LANES) {
            const IntVec enters = load(row + i) > worst;
            bool any = false;
            for (int lane = 0; lane < LANES; ++lane) any |= enters[lane] != 0;
            if (!any) continue;
            for (int lane = 0; lane < LANES; ++lane) {
                scores[count] = row[i + lane];
                positions[count] = static_cast<int32_t>(begin + i + lane);
                count -= enters[lane];
            }
        }
#endif
    }

    // Keeps the `places` best of more, in their order.
    void cut(int64_t places) {
        const float infinity = std::numeric_limits<float>::infinity();
        store(scores + count, splat(-infinity));  // what counts and maxima read behind the last
        Vec highest = splat(-infinity);
        for (int64_t i = 0; i < count; i += LANES) highest = max(highest, load(scores + i));
        float top = highest[0];
        for (int lane = 1; lane < LANES; ++lane) top = std::max(top, highest[lane]);
        // More than `places` scores are above `low`, fewer are above `high`.
        int64_t low = rank_of(is_open ? -infinity : threshold) - 1, high = rank_of(top);
        bool is_exact = false;
        while (high - low > 1) {
            const int64_t middle = low + (high - low) / 2, above = num_above(number_of_rank(middle));
            (above >= places ? low : high) = middle;
            if (above == places) {
                is_exact = true;
                break;
            }
        }
        // Exactly `places` are above low, or high is the worst score that stays: of its equals the first ones fit.
        const float cut_at = number_of_rank(is_exact ? low : high);
        keep(cut_at, is_exact ? 0 : places - num_above(cut_at));
        is_open = false;
    }

private:
    LP_INLINE int64_t num_above(float x) const {
        IntVec counts{};
        const Vec limit = splat(x);
        for (int64_t i = 0; i < count; i += LANES) counts += load(scores + i) > limit;
        int64_t total = 0;
        for (int lane = 0; lane < LANES; ++lane) total -= counts[lane];
        return total;
    }

    void keep(float cut_at, int64_t free) {
        int64_t kept = 0;
        float worst = std::numeric_limits<float>::infinity();
#if defined(__AVX512F__)
        const __m512 limit = _mm512_set1_ps(cut_at);
        __m512 lowest = _mm512_set1_ps(worst);
        for (int64_t i = 0; i < count; i += LANES) {
            const __m512 x = _mm512_loadu_ps(scores + i);
            const __m512i p = _mm512_loadu_si512(positions + i);
            const unsigned inside = count - i < LANES ? (1u << (count - i)) - 1 : 0xffffu;
            unsigned stays = _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ) & inside;
            for (unsigned equals = free ? _mm512_cmp_ps_mask(x, limit, _CMP_EQ_OQ) & inside : 0; equals && free;
                 equals &= equals - 1, --free)
                stays |= equals & -equals;
            lowest = _mm512_mask_min_ps(lowest, static_cast<__mmask16>(stays), lowest, x);
            _mm512_storeu_ps(scores + kept, _mm512_maskz_compress_ps(static_cast<__mmask16>(stays), x));
            _mm512_storeu_si512(positions + kept, _mm512_maskz_compress_epi32(static_cast<__mmask16>(stays), p));
            kept += __builtin_popcount(stays);
        }
        for (int lane = 0; lane < LANES; ++lane) worst = std::min(worst, ((Vec)lowest)[lane]);
#else
        for (int64_t i = 0; i < count; ++i) {
            const float x = scores[i];
            const bool is_equal = x == cut_at && free > 0;
            free -= is_equal;
            const bool stays = is_equal || x > cut_at;
            worst = stays && x < worst ? x : worst;
            scores[kept] = x;
            positions[kept] = positions[i];
            kept += stays;
        }
#endif
        count = kept;
        threshold = worst;
    }
};

}  // namespace
}  // namespace longprefill
