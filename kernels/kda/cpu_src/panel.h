// One panel of the state through one tile: Delta = (I + L)^-1 (beta V - beta K-tilde S), O = Q-tilde S + B Delta,
// S = diag(P_C) S + K-hat^T Delta. Derivation: ../README.md.
//
// Legend: C tokens a tile, K key dim (padded), V value dim; a panel is PANEL columns of the state, [K, PANEL]: 16 KiB at
// K = 128, so it stays in L1 beside the panel's Delta and the tile's keys and queries (24 KiB).
#pragma once

#include "tile.h"

namespace longprefill {
namespace {

// Delta = (I + L)^-1 right side, in place on one panel [C, PANEL]: blocks of 16 rows, forward substitution inside.
void solve(const Tile& tile, float* delta) {
    for (int64_t block = 0; block < tile.num_rows; block += BLOCK) {
        if (block > 0)
            for (int64_t i = block; i < block + BLOCK; i += TILE_ROWS) {
                Accumulators sums;
                load_tile(sums, delta + i * PANEL, PANEL);
                multiply_add<true>(sums, tile.lower + i * C, C, delta, PANEL, block);
                store_tile(sums, delta + i * PANEL, PANEL);
            }
        const float* lower = tile.lower + block * C + block;
        for (int column = 0; column < PANEL; column += LANES) {
            Vec x[BLOCK];
#pragma GCC unroll 16
            for (int i = 0; i < BLOCK; ++i) x[i] = load(delta + (block + i) * PANEL + column);
#pragma GCC unroll 16
            for (int j = 0; j < BLOCK - 1; ++j)
#pragma GCC unroll 16
                for (int i = j + 1; i < BLOCK; ++i) x[i] -= splat(lower[i * C + j]) * x[j];
#pragma GCC unroll 16
            for (int i = 1; i < BLOCK; ++i) store(delta + (block + i) * PANEL + column, x[i]);
        }
    }
}

// delta = beta V - (beta K-tilde) S; `values` null: V = 0 (columns of M).
template <typename V>
void right_side(const Tile& tile, const float* state, const V* values, int64_t value_row, int64_t count,
                int64_t num_columns, float* delta, Ahead& ahead) {
    for (int64_t i = 0; i < tile.num_rows; i += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        zero(sums);
        if (values != nullptr) {
            // Rows of V are far apart: the next ones come while these are worked on.
            for (int m = TILE_ROWS; m < 2 * TILE_ROWS && i + m < count; ++m)
                for (int64_t j = 0; j < PANEL; j += 64 / static_cast<int64_t>(sizeof(V)))
                    __builtin_prefetch(values + (i + m) * value_row + j);
#pragma GCC unroll 8
            for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
                for (int j = 0; j < PANEL_VECS; ++j) {
                    const int some = static_cast<int>(std::clamp<int64_t>(num_columns - j * LANES, 0, LANES));
                    if (i + m < count)
                        sums[m][j] = load_some(values + (i + m) * value_row + j * LANES, some) * tile.beta[i + m];
                }
        }
        multiply_add<true>(sums, tile.beta_k + i * tile.num_keys, tile.num_keys, state, PANEL, tile.num_keys);
        store_tile(sums, delta + i * PANEL, PANEL);
    }
}

// out = Q-tilde S + B Delta, exactly the triangle: not even a NaN of a later row reaches an earlier one.
template <typename V>
void outputs(const Tile& tile, const float* state, const float* delta, int64_t count, int64_t num_columns, V* out,
             int64_t out_row, Ahead& ahead) {
    for (int64_t i = 0; i < count; i += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        zero(sums);
        multiply_add(sums, tile.query + i * tile.num_keys, tile.num_keys, state, PANEL, tile.num_keys);
        multiply_add(sums, tile.attention + i * C, C, delta, PANEL, i);
#pragma GCC unroll 8
        for (int j = 0; j < TILE_ROWS; ++j)
#pragma GCC unroll 8
            for (int m = j; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
                for (int n = 0; n < PANEL_VECS; ++n)
                    sums[m][n] += splat(tile.attention[(i + m) * C + i + j]) * load(delta + (i + j) * PANEL + n * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
            for (int n = 0; n < PANEL_VECS; ++n) {
                const int some = static_cast<int>(std::clamp<int64_t>(num_columns - n * LANES, 0, LANES));
                if (i + m < count) store_some(out + (i + m) * out_row + n * LANES, sums[m][n], some);
            }
    }
}

// S = diag(P_C) S + K-hat^T Delta.
void advance(const Tile& tile, float* state, const float* delta, Ahead& ahead) {
    for (int64_t c = 0; c < tile.num_keys; c += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        load_tile(sums, state + c * PANEL, PANEL);
#pragma GCC unroll 8
        for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
            for (int j = 0; j < PANEL_VECS; ++j) sums[m][j] *= splat(tile.decay()[c + m]);
        multiply_add_transposed(sums, tile.key_end + c, tile.num_keys, delta, PANEL, tile.num_rows);
        store_tile(sums, state + c * PANEL, PANEL);
    }
}

// [K, columns] of a tensor to and from panels; padding is zero.
inline void import_state(float* panels, const float* state, int64_t num_keys, int64_t padded_keys, int64_t columns) {
    for (int64_t first = 0; first < columns; first += PANEL, panels += padded_keys * PANEL)
        for (int64_t c = 0; c < padded_keys; ++c)
            for (int64_t j = 0; j < PANEL; ++j)
                panels[c * PANEL + j] =
                    state != nullptr && c < num_keys && first + j < columns ? state[c * columns + first + j] : 0.0f;
}
inline void export_state(const float* panels, float* state, int64_t num_keys, int64_t padded_keys, int64_t columns) {
    for (int64_t first = 0; first < columns; first += PANEL, panels += padded_keys * PANEL)
        for (int64_t c = 0; c < num_keys; ++c)
            std::memcpy(state + c * columns + first, panels + c * PANEL,
                        std::min<int64_t>(PANEL, columns - first) * sizeof(float));
}

inline bool is_zero(const float* panel, int64_t size) {
    UintVec seen{};
    for (int64_t i = 0; i < size; i += LANES) seen |= (UintVec)absolute(load(panel + i));
    uint32_t any = 0;
    for (int lane = 0; lane < LANES; ++lane) any |= seen[lane];
    return any == 0;
}

}  // namespace
}  // namespace longprefill
