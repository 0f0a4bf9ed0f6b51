// The part of one tile and head that does not depend on the state: decayed keys and queries, L and B.
//
// Legend: C tokens a tile, K key dim (padded to a multiple of 16), i row, j earlier row. Derivation: ../README.md, "the
// dyadic split". Every decay is a product of alpha = exp(g) <= 1; there is one exp a token and channel.
#pragma once

#include <algorithm>

#include "decay.h"
#include "longprefill/gemm.h"

namespace longprefill {
namespace {

// Measured on AVX-512 at K = V = 128: at 16 a tile's keys, queries and a panel of the state fit L1 together; 32 takes 16 %
// longer, 64 takes 40 %.
constexpr int64_t C = 16;
constexpr int64_t BLOCK = 16;
constexpr int64_t MAX_KEYS = 256;
// Of a tile's 640 lines at K = V = 128 with each of its 80 or 320 micro-kernels.
constexpr int FETCH_LINES = LANES == 16 ? 16 : 2;

// One head's inputs from the first row of a segment on, and where its outputs go (null in a summary); rows are *_row apart.
template <typename V>
struct HeadInputs {
    const float *q, *k, *g, *beta;
    const V* v;
    V* out;
    int64_t q_row, k_row, g_row, beta_row, v_row, out_row;
};

// Fetches the inputs of the tile that comes next, and the lines of its outputs, into the second-level cache, a few at each
// call, behind the arithmetic: a token's row of one head is 512 bytes on a page of its own, which no hardware prefetcher
// foresees.
class Ahead {
public:
    template <typename V>
    Ahead(const HeadInputs<V>& in, int64_t row, int64_t count, int64_t num_keys, int64_t num_values, bool with_queries)
        : left_(count) {
        add(in.k + row * in.k_row, in.k_row, num_keys);
        add(in.g + row * in.g_row, in.g_row, num_keys);
        if (with_queries) add(in.q + row * in.q_row, in.q_row, num_keys);
        add(in.v + row * in.v_row, in.v_row, num_values);
        if (in.out != nullptr) add(in.out + row * in.out_row, in.out_row, num_values);
    }
    Ahead() = default;

    LP_INLINE void fetch() {
        for (int line = 0; line < FETCH_LINES && left_ > 0; ++line) {
            __builtin_prefetch(at_[next_] + byte_, 0, 2);
            if ((byte_ += 64) < bytes_[next_]) continue;
            at_[next_] += step_[next_], byte_ = 0;
            if (++next_ == count_) next_ = 0, --left_;
        }
    }

private:
    template <typename T>
    void add(const T* from, int64_t row, int64_t width) {
        at_[count_] = reinterpret_cast<const char*>(from), step_[count_] = row * static_cast<int64_t>(sizeof(T));
        bytes_[count_++] = width * static_cast<int64_t>(sizeof(T));
    }
    const char* at_[5];
    int64_t step_[5], bytes_[5], left_ = 0, byte_ = 0;
    int count_ = 0, next_ = 0;
};

// Work memory of one tile. Rows past the tile's last token, up to a multiple of BLOCK, are those of k = q = beta = g = 0.
struct Tile {
    float* beta_k;     // [C, K] beta k, decayed from the tile's start through its row: beta K-tilde
    float* query;      // [C, K] scale q, decayed likewise: Q-tilde
    float* key_end;    // [C, K] k, decayed after its row to the tile's end: K-hat
    float* alpha;      // [C, K] scratch; the first row of a finished block holds the block's decay
    float* change;     // [K] with `kept` the tile's decay P_C, P_C S = kept S + change S: split_decay
    float* kept;       // [K]
    float* lower;      // [C, C] L below the diagonal
    float* attention;  // [C, C] B, its diagonal included
    float* beta;       // [C]
    float* log_decay;  // [K] scratch: the sum of g
    int64_t num_rows;  // a multiple of BLOCK
    int64_t num_keys;  // padded K

    static int64_t floats(int64_t padded_keys) { return (4 * C + 3) * padded_keys + 2 * C * C + C; }

    void place(float* memory, int64_t padded_keys) {
        num_keys = padded_keys;
        beta_k = memory, query = beta_k + C * num_keys, key_end = query + C * num_keys;
        alpha = key_end + C * num_keys, lower = alpha + C * num_keys, attention = lower + C * C;
        beta = attention + C * C, log_decay = beta + C;
        change = log_decay + num_keys, kept = change + num_keys;
    }
};

// Sums of lanes, LANES of them at a time.
struct Totals {
    Vec sums[LANES];
    float* out[LANES];
    int count = 0;

    LP_INLINE void add(Vec lanes, float* to) {
        sums[count] = lanes, out[count] = to;
        if (++count == LANES) flush();
    }
    LP_INLINE void flush() {
        for (int i = count; i < LANES; ++i) sums[i] = Vec{};
        float totals[LANES];
        store(totals, sums_of(sums));
        for (int i = 0; i < count; ++i) *out[i] = totals[i];
        count = 0;
    }
};

alignas(64) constexpr float NO_ROW[MAX_KEYS] = {};  // what a row past the tile's last token reads

// Loads rows `first` and `first` + 1 of the tile, the first `count` rows of it real, and joins them: level 1 of the split.
template <bool WITH_QUERIES, typename V>
LP_INLINE void load_pair(Tile& tile, const HeadInputs<V>& in, int64_t row, int64_t first, int64_t count,
                         int64_t real_keys, float scale, Totals& totals) {
    const int64_t stride = tile.num_keys, place = first * stride, t = row + first;
    const bool real0 = first < count, real1 = first + 1 < count;
    const float *k0 = real0 ? in.k + t * in.k_row : NO_ROW, *k1 = real1 ? in.k + (t + 1) * in.k_row : NO_ROW;
    const float *q0 = real0 ? in.q + t * in.q_row : NO_ROW, *q1 = real1 ? in.q + (t + 1) * in.q_row : NO_ROW;
    const float *g0 = real0 ? in.g + t * in.g_row : NO_ROW, *g1 = real1 ? in.g + (t + 1) * in.g_row : NO_ROW;
    const float beta0 = real0 ? in.beta[t * in.beta_row] : 0.0f, beta1 = real1 ? in.beta[(t + 1) * in.beta_row] : 0.0f;
    tile.beta[first] = beta0, tile.beta[first + 1] = beta1;
    float *beta_k = tile.beta_k + place, *query = tile.query + place, *key_end = tile.key_end + place;
    float *alpha = tile.alpha + place, *log_decay = tile.log_decay;
    Vec lower{}, attention{}, diagonal0{}, diagonal1{};
    const auto channels = [&](int64_t c, int some) __attribute__((always_inline)) {
        const Vec gate0 = load_some(g0 + c, some), gate1 = load_some(g1 + c, some), sum = gate0 + gate1;
        const Vec alpha0 = exp(gate0), alpha1 = exp(gate1);
        const Vec key0 = load_some(k0 + c, some), key1 = load_some(k1 + c, some);
        const Vec beta_key1 = key1 * beta1 * alpha1;
        lower += beta_key1 * key0;
        store(beta_k + c, key0 * beta0 * alpha0), store(beta_k + stride + c, beta_key1 * alpha0);
        store(key_end + c, key0 * alpha1), store(key_end + stride + c, key1);
        store(alpha + c, alpha0 * alpha1);
        store(log_decay + c, first == 0 ? sum : load(log_decay + c) + sum);
        if (WITH_QUERIES) {
            const Vec query0 = load_some(q0 + c, some) * scale, query1 = load_some(q1 + c, some) * scale;
            const Vec decayed1 = query1 * alpha1;
            diagonal0 += query0 * key0, diagonal1 += query1 * key1, attention += decayed1 * key0;
            store(query + c, query0 * alpha0), store(query + stride + c, decayed1 * alpha0);
        }
    };
    int64_t c = 0;
    for (; c + LANES <= real_keys; c += LANES) channels(c, LANES);
    for (; c < stride; c += LANES) channels(c, static_cast<int>(std::max<int64_t>(real_keys - c, 0)));
    totals.add(lower, tile.lower + (first + 1) * C + first);
    if (!WITH_QUERIES) return;
    totals.add(diagonal0, tile.attention + first * (C + 1)), totals.add(diagonal1, tile.attention + (first + 1) * (C + 1));
    totals.add(attention, tile.attention + (first + 1) * C + first);
}

// Level 2: rows `first` + 2 and + 3 meet keys `first` and + 1, and the four become one block.
template <bool WITH_QUERIES>
LP_INLINE void join_pairs(Tile& tile, int64_t first, Totals& totals) {
    const int64_t stride = tile.num_keys, place = first * stride;
    float *beta_k = tile.beta_k + place + 2 * stride, *query = tile.query + place + 2 * stride;
    float *key_end = tile.key_end + place, *alpha = tile.alpha + place;
    Vec lower[2][2] = {}, attention[2][2] = {};
    for (int64_t c = 0; c < stride; c += LANES) {
        const Vec left = load(alpha + c), right = load(alpha + 2 * stride + c);
        const Vec key[2] = {load(key_end + c), load(key_end + stride + c)};
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const Vec of_lower = load(beta_k + i * stride + c);
            lower[i][0] += of_lower * key[0], lower[i][1] += of_lower * key[1];
            store(beta_k + i * stride + c, of_lower * left);
            if (WITH_QUERIES) {
                const Vec of_attention = load(query + i * stride + c);
                attention[i][0] += of_attention * key[0], attention[i][1] += of_attention * key[1];
                store(query + i * stride + c, of_attention * left);
            }
            store(key_end + i * stride + c, key[i] * right);
        }
        store(alpha + c, left * right);
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            const int64_t at = (first + 2 + i) * C + first + j;
            totals.add(lower[i][j], tile.lower + at);
            if (WITH_QUERIES) totals.add(attention[i][j], tile.attention + at);
        }
}

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

// Everything about rows [row, row + count) of the segment; without queries L only.
template <bool WITH_QUERIES, typename V>
LP_NOINLINE void make_tile(Tile& tile, const HeadInputs<V>& in, int64_t row, int64_t count, int64_t real_keys,
                           float scale) {
    constexpr int64_t QUAD = 4;
    tile.num_rows = (count + BLOCK - 1) / BLOCK * BLOCK;
    Totals totals;
    for (int64_t first = 0; first < tile.num_rows; first += QUAD) {
        load_pair<WITH_QUERIES>(tile, in, row, first, count, real_keys, scale, totals);
        load_pair<WITH_QUERIES>(tile, in, row, first + 2, count, real_keys, scale, totals);
        join_pairs<WITH_QUERIES>(tile, first, totals);
    }
    totals.flush();
    for (int64_t half = QUAD; half < tile.num_rows; half *= 2)
        for (int64_t p = 0; p + half < tile.num_rows; p += 2 * half) {
            const int64_t end = std::min(p + 2 * half, tile.num_rows);
            meet<WITH_QUERIES>(tile, p, p + half, end);
            join<WITH_QUERIES>(tile, p, p + half, end);
        }
    for (int64_t c = 0; c < tile.num_keys; c += LANES) {
        const Vec log_decay = load(tile.log_decay + c), product = load(tile.alpha + c);
        Vec change, kept;
        // One rounding a tile, not sixteen; not of fast gates, whose sum is itself too coarse.
        split_decay(log_decay, log_decay > -1.0f ? exp(log_decay) : product, change, kept);
        store(tile.change + c, change), store(tile.kept + c, kept);
    }
}

}  // namespace
}  // namespace longprefill
