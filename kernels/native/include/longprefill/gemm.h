// fp32 micro-kernels: ROWS x VECS vectors of results live in registers while `depth` products are added to them.
//
// A is read one number at a time, B in vectors at b[step * b_step + column]. Sums run over `depth` in order.
#pragma once

#include "longprefill/vector.h"

namespace longprefill {
namespace {

constexpr int PANEL_VECS = 2;
constexpr int PANEL = PANEL_VECS * LANES;       // columns that one pass over A serves
constexpr int TILE_ROWS = LANES == 16 ? 8 : 4;  // 16 sums of 32 registers, 8 of 16

typedef Vec Accumulators[TILE_ROWS][PANEL_VECS];

LP_INLINE void zero(Accumulators& sums) {
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_VECS; ++j) sums[i][j] = Vec{};
}

LP_INLINE void load_tile(Accumulators& sums, const float* from, int64_t row) {
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_VECS; ++j) sums[i][j] = load(from + i * row + j * LANES);
}

LP_INLINE void store_tile(const Accumulators& sums, float* to, int64_t row) {
#pragma GCC unroll 8
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < PANEL_VECS; ++j) store(to + i * row + j * LANES, sums[i][j]);
}

template <bool SUBTRACT>
LP_INLINE void add_products(Accumulators& sums, int row, float factor, const Vec (&b)[PANEL_VECS]) {
#pragma GCC unroll 2
    for (int j = 0; j < PANEL_VECS; ++j)
        sums[row][j] = SUBTRACT ? sums[row][j] - splat(factor) * b[j] : sums[row][j] + splat(factor) * b[j];
}

// sums += A B, or sums -= A B, with A row-major, rows a_row apart.
template <bool SUBTRACT = false>
LP_INLINE void multiply_add(Accumulators& sums, const float* a, int64_t a_row, const float* b, int64_t b_step,
                            int64_t depth) {
    // Three bases that the compiler cannot see through: rows 1, 2 and 4 beyond one are a scale of the address away. Left
    // to itself gcc keeps a pointer a row, runs out of registers and halves the speed.
    const float *base[3] = {a, a + 3 * a_row, a + 6 * a_row};
    asm("" : "+r"(base[1]), "+r"(base[2]));
    for (int64_t step = 0; step < depth; ++step, ++base[0], ++base[1], ++base[2], b += b_step) {
        const Vec row_b[PANEL_VECS] = {load(b), load(b + LANES)};
        add_products<SUBTRACT>(sums, 0, base[0][0], row_b);
        add_products<SUBTRACT>(sums, 1, base[0][a_row], row_b);
        add_products<SUBTRACT>(sums, 2, base[0][2 * a_row], row_b);
        add_products<SUBTRACT>(sums, 3, base[1][0], row_b);
        if constexpr (TILE_ROWS == 8) {
            add_products<SUBTRACT>(sums, 4, base[1][a_row], row_b);
            add_products<SUBTRACT>(sums, 5, base[1][2 * a_row], row_b);
            add_products<SUBTRACT>(sums, 6, base[2][0], row_b);
            add_products<SUBTRACT>(sums, 7, base[2][a_row], row_b);
        }
    }
}

// sums += A^T B with A [depth, rows], steps a_step apart: a transposed A costs nothing.
LP_INLINE void multiply_add_transposed(Accumulators& sums, const float* a, int64_t a_step, const float* b,
                                       int64_t b_step, int64_t depth) {
    for (int64_t step = 0; step < depth; ++step, a += a_step, b += b_step) {
        const Vec row_b[PANEL_VECS] = {load(b), load(b + LANES)};
#pragma GCC unroll 8
        for (int i = 0; i < TILE_ROWS; ++i) add_products<false>(sums, i, a[i], row_b);
    }
}

// rows . keys over `size` (a multiple of LANES): DOT_ROWS x DOT_KEYS inner products at a time, both sides row by row.
constexpr int DOT_ROWS = LANES == 16 ? 4 : 2;
constexpr int DOT_KEYS = LANES / DOT_ROWS;

// out[i * out_row + j] = rows[i] . keys[j] for num_rows x num_keys, multiples of DOT_ROWS and DOT_KEYS.
LP_INLINE void inner_products(const float* rows, int64_t num_rows, const float* keys, int64_t num_keys, int64_t stride,
                              int64_t size, float* out, int64_t out_row) {
    for (int64_t i = 0; i < num_rows; i += DOT_ROWS)
        for (int64_t j = 0; j < num_keys; j += DOT_KEYS) {
            Vec sums[LANES] = {};
            for (int64_t c = 0; c < size; c += LANES) {
                Vec key[DOT_KEYS];
#pragma GCC unroll 4
                for (int n = 0; n < DOT_KEYS; ++n) key[n] = load(keys + (j + n) * stride + c);
#pragma GCC unroll 4
                for (int m = 0; m < DOT_ROWS; ++m) {
                    const Vec row = load(rows + (i + m) * stride + c);
#pragma GCC unroll 4
                    for (int n = 0; n < DOT_KEYS; ++n) sums[m * DOT_KEYS + n] += row * key[n];
                }
            }
            const Vec totals = sums_of(sums);
            float lanes[LANES];
            store(lanes, totals);
#pragma GCC unroll 4
            for (int m = 0; m < DOT_ROWS; ++m)
                std::memcpy(out + (i + m) * out_row + j, lanes + m * DOT_KEYS, DOT_KEYS * sizeof(float));
        }
}

}  // namespace
}  // namespace longprefill
