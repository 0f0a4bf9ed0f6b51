// The part of one tile and head that does not depend on the state: decayed keys and queries, L and B.
//
// Legend: C tokens a tile, K key dim (padded to a multiple of 16), i row, j earlier row. Derivation: ../README.md, "the
// dyadic split". Every decay is a product of alpha = exp(g) <= 1; there is one exp a token and channel.
#pragma once

#include <algorithm>

#include "longprefill/gemm.h"

namespace longprefill {
namespace {

// Measured on AVX-512 at K = V = 128: at 16 a tile's keys, queries and a panel of the state fit L1 together; 32 takes 16 %
// longer, 64 takes 40 %.
constexpr int64_t C = 16;
constexpr int64_t BLOCK = 16;

// One head's inputs from the first row of a segment on; rows are *_row apart.
template <typename V>
struct HeadInputs {
    const float *q, *k, *g, *beta;
    const V* v;
    int64_t q_row, k_row, g_row, beta_row, v_row;
};

// Fetches the inputs of the tile that comes next into the second-level cache, a few rows at each call, behind the
// arithmetic: a token's row of one head is 512 bytes on a page of its own, which no hardware prefetcher foresees.
class Ahead {
public:
    template <typename V>
    Ahead(const HeadInputs<V>& in, int64_t row, int64_t count, int64_t num_keys, int64_t num_values, bool with_queries)
        : left_(count) {
        add(in.k + row * in.k_row, in.k_row, num_keys);
        add(in.g + row * in.g_row, in.g_row, num_keys);
        if (with_queries) add(in.q + row * in.q_row, in.q_row, num_keys);
        add(in.v + row * in.v_row, in.v_row, num_values);
    }
    Ahead() = default;

    // Two pieces of a row: about 16 lines, what a core can have under way at once.
    LP_INLINE void fetch() {
        for (int piece = 0; piece < 2 && left_ > 0; ++piece) {
            for (int64_t byte = 0; byte < bytes_[next_]; byte += 64) __builtin_prefetch(at_[next_] + byte, 0, 2);
            at_[next_] += step_[next_];
            if (++next_ == count_) next_ = 0, --left_;
        }
    }

private:
    template <typename T>
    void add(const T* from, int64_t row, int64_t width) {
        at_[count_] = reinterpret_cast<const char*>(from), step_[count_] = row * static_cast<int64_t>(sizeof(T));
        bytes_[count_++] = width * static_cast<int64_t>(sizeof(T));
    }
    const char* at_[4];
    int64_t step_[4], bytes_[4], left_ = 0;
    int count_ = 0, next_ = 0;
};

// Work memory of one tile. Rows past the tile's last token, up to a multiple of BLOCK, are those of k = q = beta = g = 0.
struct Tile {
    float* beta_k;     // [C, K] beta k, decayed from the tile's start through its row: beta K-tilde
    float* query;      // [C, K] scale q, decayed likewise: Q-tilde
    float* key_end;    // [C, K] k, decayed after its row to the tile's end: K-hat
    float* alpha;      // [C, K] scratch; the first row of a finished block holds the block's decay
    float* lower;      // [C, C] L below the diagonal
    float* attention;  // [C, C] B, its diagonal included
    float* beta;       // [C]
    int64_t num_rows;  // a multiple of BLOCK
    int64_t num_keys;  // padded K

    static int64_t floats(int64_t padded_keys) { return 4 * C * padded_keys + 2 * C * C + C; }

    void place(float* memory, int64_t padded_keys) {
        num_keys = padded_keys;
        beta_k = memory, query = beta_k + C * num_keys, key_end = query + C * num_keys;
        alpha = key_end + C * num_keys, lower = alpha + C * num_keys, attention = lower + C * C;
        beta = attention + C * C;
    }
    const float* decay() const { return alpha; }
};

LP_INLINE void scale_rows(float* rows, int64_t num_rows, int64_t stride, const float* factors, int64_t column) {
    const Vec factor = load(factors + column);
    for (int64_t i = 0; i < num_rows; ++i) store(rows + i * stride + column, load(rows + i * stride + column) * factor);
}

// Carries two neighbouring halves over to one block: see "Joining two blocks" in the README.
template <bool WITH_QUERIES>
LP_INLINE void join(Tile& tile, int64_t first, int64_t middle, int64_t end) {
    const int64_t stride = tile.num_keys;
    float *left = tile.alpha + first * stride, *right = tile.alpha + middle * stride;
    for (int64_t c = 0; c < stride; c += LANES) {
        scale_rows(tile.beta_k + middle * stride, end - middle, stride, left, c);
        if (WITH_QUERIES) scale_rows(tile.query + middle * stride, end - middle, stride, left, c);
        scale_rows(tile.key_end + first * stride, middle - first, stride, right, c);
        store(left + c, load(left + c) * load(right + c));
    }
}

// Single inner products where halves are smaller than a block of them: LANES at a time.
struct Pairs {
    const float* row[LANES];
    const float* key[LANES];
    float* out[LANES];
    int count = 0;

    LP_INLINE void add(const float* a, const float* b, float* to, int64_t size) {
        row[count] = a, key[count] = b, out[count] = to;
        if (++count == LANES) flush(size);
    }
    LP_INLINE void flush(int64_t size) {
        if (count == 0) return;
        for (int i = count; i < LANES; ++i) row[i] = row[0], key[i] = key[0];
        Vec sums[LANES] = {};
        for (int64_t c = 0; c < size; c += LANES)
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) sums[i] += load(row[i] + c) * load(key[i] + c);
        float totals[LANES];
        store(totals, sums_of(sums));
        for (int i = 0; i < count; ++i) *out[i] = totals[i];
        count = 0;
    }
};

// Rows [middle, end) meet keys [first, middle): one quarter of L and of B.
template <bool WITH_QUERIES>
LP_INLINE void meet(Tile& tile, int64_t first, int64_t middle, int64_t end) {
    const int64_t stride = tile.num_keys, place = middle * C + first;
    inner_products(tile.beta_k + middle * stride, end - middle, tile.key_end + first * stride, middle - first, stride,
                   stride, tile.lower + place, C);
    if (WITH_QUERIES)
        inner_products(tile.query + middle * stride, end - middle, tile.key_end + first * stride, middle - first,
                       stride, stride, tile.attention + place, C);
}

// Loads rows [first, first + BLOCK) of the tile, `count` of them real, and B's diagonal.
template <bool WITH_QUERIES, typename V>
void load_block(Tile& tile, const HeadInputs<V>& in, int64_t row, int64_t first, int64_t count, int64_t real_keys,
                float scale) {
    const int64_t stride = tile.num_keys;
    Vec diagonal[BLOCK] = {};
    for (int64_t i = 0; i < BLOCK; ++i) {
        float *beta_k = tile.beta_k + (first + i) * stride, *query = tile.query + (first + i) * stride;
        float *key_end = tile.key_end + (first + i) * stride, *alpha = tile.alpha + (first + i) * stride;
        if (i >= count) {
            for (int64_t c = 0; c < stride; c += LANES) {
                store(beta_k + c, Vec{}), store(query + c, Vec{}), store(key_end + c, Vec{});
                store(alpha + c, splat(1.0f));
            }
            tile.beta[first + i] = 0;
            continue;
        }
        const int64_t t = row + first + i;
        const float *k = in.k + t * in.k_row, *q = in.q + t * in.q_row, *g = in.g + t * in.g_row;
        const float beta = in.beta[t * in.beta_row];
        tile.beta[first + i] = beta;
        for (int64_t c = 0; c < stride; c += LANES) {
            const int some = static_cast<int>(std::clamp<int64_t>(real_keys - c, 0, LANES));
            const Vec decay = exp(load_some(g + c, some)), key = load_some(k + c, some);
            store(alpha + c, decay), store(key_end + c, key), store(beta_k + c, key * beta * decay);
            if (WITH_QUERIES) {
                const Vec scaled = load_some(q + c, some) * scale;
                store(query + c, scaled * decay);
                diagonal[i] += scaled * key;
            }
        }
    }
    if (!WITH_QUERIES) return;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        Vec part[LANES];
        for (int lane = 0; lane < LANES; ++lane) part[lane] = diagonal[i + lane];
        float totals[LANES];
        store(totals, sums_of(part));
        for (int lane = 0; lane < LANES; ++lane) tile.attention[(first + i + lane) * (C + 1)] = totals[lane];
    }
}

// L and B inside one block of 16 rows, whose rows stay in L1.
template <bool WITH_QUERIES>
void join_block(Tile& tile, int64_t first) {
    const int64_t stride = tile.num_keys;
    for (int64_t half = 1; half < BLOCK; half *= 2) {
        if (half < DOT_KEYS || half < DOT_ROWS) {
            Pairs pairs;
            for (int64_t p = first; p < first + BLOCK; p += 2 * half)
                for (int64_t i = p + half; i < p + 2 * half; ++i)
                    for (int64_t j = p; j < p + half; ++j) {
                        const float* key = tile.key_end + j * stride;
                        pairs.add(tile.beta_k + i * stride, key, tile.lower + i * C + j, stride);
                        if (WITH_QUERIES) pairs.add(tile.query + i * stride, key, tile.attention + i * C + j, stride);
                    }
            pairs.flush(stride);
        } else {
            for (int64_t p = first; p < first + BLOCK; p += 2 * half)
                meet<WITH_QUERIES>(tile, p, p + half, p + 2 * half);
        }
        for (int64_t p = first; p < first + BLOCK; p += 2 * half) join<WITH_QUERIES>(tile, p, p + half, p + 2 * half);
    }
}

// Everything about rows [row, row + count) of the segment; without queries L only.
template <bool WITH_QUERIES, typename V>
void make_tile(Tile& tile, const HeadInputs<V>& in, int64_t row, int64_t count, int64_t real_keys, float scale) {
    tile.num_rows = (count + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t first = 0; first < tile.num_rows; first += BLOCK) {
        load_block<WITH_QUERIES>(tile, in, row, first, std::min(BLOCK, count - first), real_keys, scale);
        join_block<WITH_QUERIES>(tile, first);
    }
    for (int64_t half = BLOCK; half < tile.num_rows; half *= 2)
        for (int64_t p = 0; p + half < tile.num_rows; p += 2 * half) {
            const int64_t end = std::min(p + 2 * half, tile.num_rows);
            meet<WITH_QUERIES>(tile, p, p + half, end);
            join<WITH_QUERIES>(tile, p, p + half, end);
        }
}

}  // namespace
}  // namespace longprefill
