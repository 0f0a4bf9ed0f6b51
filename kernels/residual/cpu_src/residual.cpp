// Attention Residuals: every row of every source is read once from memory and a second time from cache.
//
// logit = query . v / rms(v), softmax over sources, weights on the values as they are (derivation: ../README.md).
#include <algorithm>
#include <vector>

#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr int64_t GRAIN_ROWS = 8;

// query . v and v . v in one pass.
template <typename T>
LP_INLINE void products(const T* value, const float* query, int64_t size, float& with_query, float& with_itself) {
    Vec dots[2] = {}, squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int part = 0; part < 2; ++part) {
            const Vec v = load(value + i + part * LANES);
            dots[part] += v * load(query + i + part * LANES);
            squares[part] += v * v;
        }
    for_each_vector(size - i, [&](int64_t j, int count) {
        const Vec v = load_some(value + i + j, count);
        dots[0] += v * load_some(query + i + j, count);
        squares[0] += v * v;
    });
    with_query = sum(dots[0] + dots[1]);
    with_itself = sum(squares[0] + squares[1]);
}

constexpr int GROUP = 4;  // queries that share one read of a row

// out[i] = queries[i] . v for `count` <= GROUP queries, `size` apart.
template <typename T>
LP_INLINE void products_of_group(const T* value, const float* queries, int count, int64_t size, float* out) {
    const float* rows[GROUP];
    for (int i = 0; i < GROUP; ++i) rows[i] = queries + std::min(i, count - 1) * size;
    Vec dots[GROUP] = {};
    for_each_vector(size, [&](int64_t j, int some) {
        const Vec v = load_some(value + j, some);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) dots[i] += v * load_some(rows[i] + j, some);
    });
    for (int i = 0; i < count; ++i) out[i] = sum(dots[i]);
}

LP_INLINE float inverse_rms(float sum_of_squares, int64_t size, double eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares / static_cast<float>(size) + static_cast<float>(eps));
}

// e^(logit - max) in place; returns the sum.
float softmax_terms(float* logits, int64_t count, float& top) {
    top = logits[0];
    for (int64_t b = 1; b < count; ++b) top = std::max(top, logits[b]);
    float total = 0;
    for (int64_t b = 0; b < count; ++b) total += logits[b] = __builtin_expf(logits[b] - top);
    return total;
}

// sum over sources of weights[b] * rows[b], times `factor`.
template <typename T, typename Out>
void weighted_sum(const std::vector<const T*>& rows, const float* weights, float factor, int64_t size, Out* out) {
    const size_t count_rows = rows.size();
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) {
        Vec totals[4] = {};
        for (size_t b = 0; b < count_rows; ++b)
            for (int part = 0; part < 4; ++part) totals[part] += load(rows[b] + i + part * LANES) * weights[b];
        for (int part = 0; part < 4; ++part) store(out + i + part * LANES, totals[part] * factor);
    }
    for_each_vector(size - i, [&](int64_t j, int count) {
        Vec total{};
        for (size_t b = 0; b < count_rows; ++b) total += load_some(rows[b] + i + j, count) * weights[b];
        store_some(out + i + j, total * factor, count);
    });
}

// out[i] = sum over sources of weights[i][b] * rows[b] for a group of queries, each source read once.
template <typename T>
void weighted_sums_of_group(const std::vector<const T*>& rows, const float* weights, int count, int64_t size,
                            float* out, int64_t out_row) {
    const size_t num_sources = rows.size();
    for_each_vector(size, [&](int64_t j, int some) {
        Vec totals[GROUP] = {};
        for (size_t b = 0; b < num_sources; ++b) {
            const Vec v = load_some(rows[b] + j, some);
#pragma GCC unroll 4
            for (int i = 0; i < GROUP; ++i) totals[i] += v * weights[std::min(i, count - 1) * num_sources + b];
        }
        for (int i = 0; i < count; ++i) store_some(out + i * out_row + j, totals[i], some);
    });
}

// All sources are [T, D] of one dtype with contiguous rows. The words for several dtypes are those of ../plain.py.
void check_sources(const std::vector<at::Tensor>& sources) {
    check_dim(sources[0], "source 0", 2);
    for (const at::Tensor& source : sources) {
        TORCH_CHECK_VALUE(source.scalar_type() == sources[0].scalar_type(), "sources of dtypes ",
                          sources[0].scalar_type(), " and ", source.scalar_type(), ": cast them to one");
        TORCH_CHECK_VALUE(source.sizes() == sources[0].sizes(), "sources of shapes ", sources[0].sizes(), " and ",
                          source.sizes(), ": must be one");
        check_rows_contiguous(source, "source");
    }
}

at::Tensor mix(const std::vector<at::Tensor>& sources, const at::Tensor& query, double eps) {
    check_sources(sources);
    const int64_t num_rows = sources[0].size(0), size = sources[0].size(1);
    check_whole(query, "query", {size});
    at::Tensor out = at::empty(sources[0].sizes(), sources[0].options());
    const float* query_data = query.const_data_ptr<float>();
    for_float_type(sources[0], "source", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        T* out_data = out.mutable_data_ptr<T>();
        at::parallel_for(0, num_rows, GRAIN_ROWS, [&](int64_t first, int64_t end) {
            std::vector<const T*> rows(sources.size());
            std::vector<float> weights(sources.size());
            for (int64_t t = first; t < end; ++t) {
                for (size_t b = 0; b < sources.size(); ++b) {
                    rows[b] = sources[b].const_data_ptr<T>() + t * sources[b].stride(0);
                    float with_query, with_itself;
                    products(rows[b], query_data, size, with_query, with_itself);
                    weights[b] = with_query * inverse_rms(with_itself, size, eps);
                }
                float top;
                const float total = softmax_terms(weights.data(), weights.size(), top);
                weighted_sum(rows, weights.data(), 1.0f / total, size, out_data + t * size);
            }
        });
    });
    return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> prepare(const std::vector<at::Tensor>& blocks, const at::Tensor& queries,
                                                       double eps) {
    check_sources(blocks);
    const int64_t num_rows = blocks[0].size(0), size = blocks[0].size(1), num_queries = queries.size(0);
    check_whole(queries, "queries", {num_queries, size});
    at::Tensor top = at::empty({num_queries, num_rows}, queries.options());
    at::Tensor total = at::empty({num_queries, num_rows}, queries.options());
    at::Tensor weighted = at::empty({num_queries, num_rows, size}, queries.options());
    if (num_queries == 0) return {top, total, weighted};
    const float* query_data = queries.const_data_ptr<float>();
    float *top_data = top.mutable_data_ptr<float>(), *total_data = total.mutable_data_ptr<float>();
    float* weighted_data = weighted.mutable_data_ptr<float>();
    for_float_type(blocks[0], "block", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        at::parallel_for(0, num_rows, GRAIN_ROWS, [&](int64_t first, int64_t end) {
            std::vector<const T*> rows(blocks.size());
            std::vector<float> weights(GROUP * blocks.size()), inverse(blocks.size());
            for (int64_t t = first; t < end; ++t) {
                for (size_t b = 0; b < blocks.size(); ++b) {
                    rows[b] = blocks[b].const_data_ptr<T>() + t * blocks[b].stride(0);
                    float unused, with_itself;
                    products(rows[b], query_data, size, unused, with_itself);
                    inverse[b] = inverse_rms(with_itself, size, eps);
                }
                for (int64_t q = 0; q < num_queries; q += GROUP) {
                    const int count = static_cast<int>(std::min<int64_t>(GROUP, num_queries - q));
                    for (size_t b = 0; b < blocks.size(); ++b) {
                        float dots[GROUP];
                        products_of_group(rows[b], query_data + q * size, count, size, dots);
                        for (int i = 0; i < count; ++i) weights[i * blocks.size() + b] = dots[i] * inverse[b];
                    }
                    for (int i = 0; i < count; ++i) {
                        const int64_t place = (q + i) * num_rows + t;
                        total_data[place] =
                            softmax_terms(weights.data() + i * blocks.size(), blocks.size(), top_data[place]);
                    }
                    weighted_sums_of_group(rows, weights.data(), count, size,
                                           weighted_data + (q * num_rows + t) * size, num_rows * size);
                }
            }
        });
    });
    return {top, total, weighted};
}

// Phase 1 of one query (max [T], sum [T], weighted [T, D]) and the running partial [T, D]; result in the partial's dtype.
at::Tensor update_mix(const at::Tensor& partial, const at::Tensor& top, const at::Tensor& total,
                      const at::Tensor& weighted, const at::Tensor& query, double eps) {
    check_dim(partial, "partial", 2), check_rows_contiguous(partial, "partial");
    const int64_t num_rows = partial.size(0), size = partial.size(1), stride = partial.stride(0);
    check_whole(top, "the maximum of phase 1", {num_rows}), check_whole(total, "the sum of phase 1", {num_rows});
    check_whole(weighted, "the weighted sum of phase 1", {num_rows, size}), check_whole(query, "query", {size});
    at::Tensor out = at::empty(partial.sizes(), partial.options());
    const float *top_data = top.const_data_ptr<float>(), *total_data = total.const_data_ptr<float>();
    const float *weighted_data = weighted.const_data_ptr<float>(), *query_data = query.const_data_ptr<float>();
    for_float_type(partial, "partial", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* partial_data = partial.const_data_ptr<T>();
        T* out_data = out.mutable_data_ptr<T>();
        at::parallel_for(0, num_rows, GRAIN_ROWS, [&](int64_t first, int64_t end) {
            for (int64_t t = first; t < end; ++t) {
                const T* value = partial_data + t * stride;
                const float* before = weighted_data + t * size;
                float with_query, with_itself;
                products(value, query_data, size, with_query, with_itself);
                const float logit = with_query * inverse_rms(with_itself, size, eps);
                const float highest = std::max(logit, top_data[t]);
                const float old_term = __builtin_expf(top_data[t] - highest);
                const float new_term = __builtin_expf(logit - highest);
                const float inverse = 1.0f / (old_term * total_data[t] + new_term);
                const float old_weight = old_term * inverse, new_weight = new_term * inverse;
                for_each_vector(size, [&](int64_t i, int count) {
                    store_some(out_data + t * size + i,
                               load_some(before + i, count) * old_weight + load_some(value + i, count) * new_weight,
                               count);
                });
            }
        });
    });
    return out;
}

}  // namespace

LONGPREFILL_OPS(residual, m) {
    m.def("attn_res_mix(Tensor[] sources, Tensor query, float eps) -> Tensor", TORCH_FN(mix));
    m.def("attn_res_prepare(Tensor[] blocks, Tensor queries, float eps) -> (Tensor, Tensor, Tensor)",
          TORCH_FN(prepare));
    m.def("attn_res_update(Tensor partial, Tensor top, Tensor total, Tensor weighted, Tensor query, float eps) -> Tensor",
          TORCH_FN(update_mix));
}

}  // namespace longprefill
