// One panel of the state through one tile: Delta = (I + L)^-1 (beta V - beta K-tilde S), O = Q-tilde S + B Delta,
// S = diag(P_C) S + K-hat^T Delta. Derivation: ../README.md.
//
// Legend: C tokens a tile, K key dim (padded), V value dim; a panel is PANEL columns of the state, [K, PANEL]: 16 KiB at
// K = 128 (8 KiB on AVX2), so it stays in L1 beside the panel's Delta and the tile's keys and queries (24 KiB).
#pragma once

#include "tile.h"

namespace longprefill {
namespace {

// Delta = (I + L)^-1 right side, in place on one panel [C, PANEL]: forward substitution, TILE_ROWS rows at a time.
LP_NOINLINE void solve(const Tile& tile, float* delta) {
    for (int64_t row = 0; row < tile.num_rows; row += TILE_ROWS) {
        const float* lower = tile.lower + row * C;
        Accumulators sums;
        load_tile(sums, delta + row * PANEL, PANEL);
        multiply_add<true>(sums, lower, C, delta, PANEL, row);
#pragma GCC unroll 8
        for (int j = 0; j < TILE_ROWS - 1; ++j)
#pragma GCC unroll 8
            for (int i = j + 1; i < TILE_ROWS; ++i) add_products<true>(sums, i, lower[i * C + row + j], sums[j]);
        store_tile(sums, delta + row * PANEL, PANEL);
    }
}

// sums = beta V for the first `count` rows and `num_columns` columns, 0 beyond.
template <typename V>
LP_INLINE void load_values(Accumulators& sums, const V* values, int64_t value_row, const float* beta, int64_t count,
                           int64_t num_columns) {
    if (count < TILE_ROWS || num_columns < PANEL) {
        float edge[TILE_ROWS * PANEL] = {};
        for (int64_t m = 0; m < std::min<int64_t>(count, TILE_ROWS); ++m)
            for (int64_t j = 0; j < std::min<int64_t>(num_columns, PANEL); ++j)
                edge[m * PANEL + j] = static_cast<float>(values[m * value_row + j]) * beta[m];
        return load_tile(sums, edge, PANEL);
    }
#pragma GCC unroll 8
    for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_VECS; ++j) sums[m][j] = load(values + m * value_row + j * LANES) * beta[m];
}

template <typename V>
LP_INLINE void store_outputs(const Accumulators& sums, V* out, int64_t out_row, int64_t count, int64_t num_columns) {
    if (count < TILE_ROWS || num_columns < PANEL) {
        float edge[TILE_ROWS * PANEL];
        store_tile(sums, edge, PANEL);
        for (int64_t m = 0; m < std::min<int64_t>(count, TILE_ROWS); ++m)
            for_each_vector(std::min<int64_t>(num_columns, PANEL), [&](int64_t j, int some) {
                store_some(out + m * out_row + j, load(edge + m * PANEL + j), some);
            });
        return;
    }
#pragma GCC unroll 8
    for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_VECS; ++j) store(out + m * out_row + j * LANES, sums[m][j]);
}

// delta = beta V - (beta K-tilde) S; `values` null: V = 0 (columns of M).
template <typename V>
LP_NOINLINE void right_side(const Tile& tile, const float* state, const V* values, int64_t value_row, int64_t count,
                            int64_t num_columns, float* delta, Ahead& ahead) {
    for (int64_t i = 0; i < tile.num_rows; i += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        zero(sums);
        if (values != nullptr)
            load_values(sums, values + i * value_row, value_row, tile.beta + i, count - i, num_columns);
        multiply_add<true>(sums, tile.beta_k + i * tile.num_keys, tile.num_keys, state, PANEL, tile.num_keys);
        store_tile(sums, delta + i * PANEL, PANEL);
    }
}

// out = Q-tilde S + B Delta, exactly the triangle: not even a NaN of a later row reaches an earlier one.
template <typename V>
LP_NOINLINE void outputs(const Tile& tile, const float* state, const float* delta, int64_t count, int64_t num_columns,
                         V* out, int64_t out_row, Ahead& ahead) {
    for (int64_t i = 0; i < count; i += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        zero(sums);
        multiply_add(sums, tile.query + i * tile.num_keys, tile.num_keys, state, PANEL, tile.num_keys);
        multiply_add(sums, tile.attention + i * C, C, delta, PANEL, i);
#pragma GCC unroll 8
        for (int j = 0; j < TILE_ROWS; ++j) {
            const Vec row[PANEL_VECS] = {load(delta + (i + j) * PANEL), load(delta + (i + j) * PANEL + LANES)};
#pragma GCC unroll 8
            for (int m = j; m < TILE_ROWS; ++m) add_products<false>(sums, m, tile.attention[(i + m) * C + i + j], row);
        }
        store_outputs(sums, out + i * out_row, out_row, count - i, num_columns);
    }
}

// S = diag(P_C) S + K-hat^T Delta; what is added to a slow channel is summed first (decay.h).
LP_NOINLINE void advance(const Tile& tile, float* state, const float* delta, Ahead& ahead) {
    for (int64_t c = 0; c < tile.num_keys; c += TILE_ROWS) {
        ahead.fetch();
        Accumulators sums;
        zero(sums);
        multiply_add_transposed(sums, tile.key_end + c, tile.num_keys, delta, PANEL, tile.num_rows);
#pragma GCC unroll 8
        for (int m = 0; m < TILE_ROWS; ++m)
#pragma GCC unroll 2
            for (int j = 0; j < PANEL_VECS; ++j) {
                const Vec old = load(state + (c + m) * PANEL + j * LANES);
                sums[m][j] += old * splat(tile.change[c + m]);
                sums[m][j] += old * splat(tile.kept[c + m]);
            }
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
