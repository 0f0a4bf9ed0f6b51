// fp32 products for processors without a matrix unit: A row by row, B in stripes.
//
// A stripe is STRIPE neighbouring columns, one row after the other. STRIPE_ROWS x STRIPE sums stay in registers while
// both operands are read straight ahead: each step loads three vectors of B and one number of every row of A. On AVX2
// that is 7 loads for 12 products of vectors, so the multipliers are the limit. Sums run over the depth in order.
#pragma once

#include <algorithm>

#include "longprefill/buffer.h"
#include "longprefill/vector.h"

namespace longprefill {
namespace {

constexpr int STRIPE_VECS = 3;
constexpr int STRIPE = STRIPE_VECS * LANES;
constexpr int STRIPE_ROWS = LANES == 16 ? 8 : 4;  // 24 sums of 32 registers, 12 of 16

// Sums of ROWS x VECS vectors.
template <int ROWS, int VECS>
struct StripeSums {
    Vec sums[ROWS][VECS];

    LP_INLINE void zero() {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j) sums[i][j] = Vec{};
    }
    LP_INLINE void load_from(const float* from, int64_t row) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j) sums[i][j] = load(from + i * row + j * LANES);
    }
    LP_INLINE void store_to(float* to, int64_t row) const {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j) store(to + i * row + j * LANES, sums[i][j]);
    }

    // sums += A B. A: rows a_row apart, numbers of a row a_step apart; B: rows b_row apart.
    LP_INLINE void multiply_add(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row,
                                int64_t depth) {
        // Bases that the compiler cannot see through: a pointer a row would take the registers of the sums.
        const float *base[3] = {a, a + 3 * a_row, a + 6 * a_row};
        asm("" : "+r"(base[1]), "+r"(base[2]));
        for (int64_t k = 0; k < depth; ++k, base[0] += a_step, base[1] += a_step, base[2] += a_step, b += b_row) {
            Vec columns[VECS];
#pragma GCC unroll 4
            for (int j = 0; j < VECS; ++j) columns[j] = load(b + j * LANES);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const Vec number = splat(base[i / 3][i % 3 * a_row]);
#pragma GCC unroll 4
                for (int j = 0; j < VECS; ++j) sums[i][j] += number * columns[j];
            }
        }
    }
};

typedef StripeSums<STRIPE_ROWS, STRIPE_VECS> StripeTile;

// Stripes of a matrix [depth, columns]: stripe n begins at data + n * depth * STRIPE.
inline int64_t num_stripes(int64_t columns) { return (columns + STRIPE - 1) / STRIPE; }

// a[0], b[0], a[1], b[1], ... : the lower half of them, or the upper one.
template <int UPPER>
LP_INLINE Vec interleave(Vec a, Vec b) {
    constexpr int A = UPPER * LANES / 2, B = A + LANES;
#if defined(__AVX512F__)
    return __builtin_shuffle(a, b, IntVec{A, B, A + 1, B + 1, A + 2, B + 2, A + 3, B + 3, A + 4, B + 4, A + 5, B + 5,
                                          A + 6, B + 6, A + 7, B + 7});
#elif defined(__AVX2__)
    return __builtin_shuffle(a, b, IntVec{A, B, A + 1, B + 1, A + 2, B + 2, A + 3, B + 3});
#else
    return __builtin_shuffle(a, b, IntVec{A, B, A + 1, B + 1});
#endif
}

// Transposes LANES x LANES numbers in registers.
LP_INLINE void transpose(Vec (&x)[LANES]) {
    // Each turn joins rows i and i + LANES / 2 number by number; after log2(LANES) of them every number is in its place.
#pragma GCC unroll 4
    for (int turn = 1; turn < LANES; turn *= 2) {
        Vec y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            y[2 * i] = interleave<0>(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = interleave<1>(x[i], x[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) x[i] = y[i];
    }
}

// Rows of a matrix as columns of one stripe [depth, STRIPE]: `count` rows, zeros for the others.
template <typename T>
void pack_rows(const T* rows, int64_t row, int64_t count, int64_t depth, float* stripe) {
    for (int64_t n = 0; n < STRIPE; n += LANES) {
        const int64_t present = std::min<int64_t>(LANES, std::max<int64_t>(0, count - n));
        for_each_vector(depth, [&](int64_t k, int width) {
            Vec block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) block[i] = i < present ? load_some(rows + (n + i) * row + k, width) : Vec{};
            transpose(block);
            for (int i = 0; i < width; ++i) store(stripe + (k + i) * STRIPE + n, block[i]);
        });
    }
}

// Columns [0, count) of a matrix whose rows are `row` apart as one stripe, zeros behind them.
template <typename T>
void pack_columns(const T* matrix, int64_t row, int64_t count, int64_t depth, float* stripe) {
    for (int64_t k = 0; k < depth; ++k)
#pragma GCC unroll 4
        for (int64_t n = 0; n < STRIPE; n += LANES) {
            const int64_t present = std::min<int64_t>(LANES, std::max<int64_t>(0, count - n));
            store(stripe + k * STRIPE + n, present ? load_some(matrix + k * row + n, static_cast<int>(present)) : Vec{});
        }
}

}  // namespace
}  // namespace longprefill
