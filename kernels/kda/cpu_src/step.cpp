// KDA decode: one token of each of several requests. Derivation: ../README.md, "One token".
//
// Legend: N requests, G value heads, K key dim, V value dim. A head's state [K, V] is read once from memory (twice from
// the second-level cache) and written once; while it is updated, the next one is on its way.
#include <vector>

#include "decay.h"
#include "longprefill/torch.h"

namespace longprefill {
namespace {

constexpr int STEP_VECS = LANES == 16 ? 8 : 4;  // columns read together: two sums each, 16 of 32 registers or 8 of 16
constexpr int STEP_COLUMNS = STEP_VECS * LANES;
constexpr int64_t STEP_GRAIN = 4;               // heads that are worth a thread

// One head's inputs in the order of the arithmetic; `of_k` and `of_q` are k and q under the decay.
struct StepHead {
    std::vector<float> change, kept, of_k, of_q, delta;
    float overlap;

    StepHead(int64_t num_keys, int64_t num_values)
        : change(num_keys), kept(num_keys), of_k(num_keys), of_q(num_keys), delta(num_values) {}

    void read(const float* q, const float* k, const float* g) {
        overlap = 0;
        for_each_vector(static_cast<int64_t>(change.size()), [&](int64_t c, int count) {
            const Vec gate = load_some(g + c, count), decay = exp(gate);
            const Vec key = load_some(k + c, count), query = load_some(q + c, count);
            Vec change_here, kept_here;
            split_decay(gate, decay, change_here, kept_here);
            store_some(change.data() + c, change_here, count), store_some(kept.data() + c, kept_here, count);
            store_some(of_k.data() + c, decay * key, count);
            store_some(of_q.data() + c, decay * query, count);
            overlap += sum(key * query);
        });
    }
};

// Columns [0, width) of one head: delta and out from the old state, whose rows are `columns` apart.
template <int VECS, typename V>
LP_INLINE void read_columns(StepHead& head, const float* state, int64_t columns, int64_t first, const V* v, float beta,
                            float scale, V* out) {
    Vec with_k[VECS] = {}, with_q[VECS] = {};
    for (size_t c = 0; c < head.change.size(); ++c)
#pragma GCC unroll 8
        for (int j = 0; j < VECS; ++j) {
            const Vec row = load(state + c * columns + first + j * LANES);
            with_k[j] += row * head.of_k[c];
            with_q[j] += row * head.of_q[c];
        }
#pragma GCC unroll 8
    for (int j = 0; j < VECS; ++j) {
        const Vec change = (load(v + first + j * LANES) - with_k[j]) * beta;
        store(head.delta.data() + first + j * LANES, change);
        store(out + first + j * LANES, (with_q[j] + change * head.overlap) * scale);
    }
}

template <typename V>
LP_INLINE void read_rest(StepHead& head, const float* state, int64_t columns, int64_t first, int count, const V* v,
                         float beta, float scale, V* out) {
    Vec with_k{}, with_q{};
    for (size_t c = 0; c < head.change.size(); ++c) {
        const Vec row = load_some(state + c * columns + first, count);
        with_k += row * head.of_k[c];
        with_q += row * head.of_q[c];
    }
    const Vec change = (load_some(v + first, count) - with_k) * beta;
    store_some(head.delta.data() + first, change, count);
    store_some(out + first, (with_q + change * head.overlap) * scale, count);
}

// fresh = diag(exp g) state + k delta^T; each row of `ahead` is fetched beside the same row.
LP_INLINE void update(const StepHead& head, const float* state, float* fresh, int64_t columns, const float* k,
                      const float* ahead) {
    for (size_t c = 0; c < head.change.size(); ++c) {
        const int64_t row = static_cast<int64_t>(c) * columns;
        if (ahead != nullptr)
            for (int64_t j = 0; j < columns; j += 16) __builtin_prefetch(ahead + row + j, 0, 2);
        for_each_vector(columns, [&](int64_t j, int count) {
            const Vec old = load_some(state + row + j, count), delta = load_some(head.delta.data() + j, count);
            store_some(fresh + row + j, old * head.kept[c] + (old * head.change[c] + delta * k[c]), count);
        });
    }
}

void check_states(at::TensorList states, const char* name, int64_t num_requests, int64_t heads, int64_t num_keys,
                  int64_t num_values) {
    TORCH_CHECK_VALUE(static_cast<int64_t>(states.size()) == num_requests, states.size(), " of ", name, " for ",
                      num_requests, " requests: must be one a request");
    for (const at::Tensor& state : states) {
        check_fp32(state, name);
        check_whole(state, name, {heads, num_keys, num_values});
    }
}

// q, k [N, H, K], g [N, G, K], beta [N, G] fp32, v [N, G, V]; states and fresh: N tensors [G, K, V], which may be the same
// ones. Returns [N, G, V] in v's dtype.
at::Tensor step(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                const at::Tensor& beta, at::TensorList states, at::TensorList fresh, double scale) {
    check_fp32(q, "q"), check_fp32(k, "k"), check_fp32(g, "g"), check_fp32(beta, "beta");
    check_rows_contiguous(q, "q"), check_rows_contiguous(k, "k"), check_rows_contiguous(v, "v");
    check_rows_contiguous(g, "g"), check_rows_contiguous(beta, "beta");
    const int64_t num_requests = v.size(0), heads = v.size(1), columns = v.size(2);
    const int64_t key_heads = k.size(1), num_keys = k.size(2);
    TORCH_CHECK_VALUE(key_heads > 0 && heads % key_heads == 0, heads, " value heads, ", key_heads,
                      " q/k heads: value heads must be a multiple");
    check_dim(v, "v", 3), check_shape(k, "k", {num_requests, key_heads, num_keys}), check_shape(q, "q", k.sizes());
    check_shape(g, "g", {num_requests, heads, num_keys}), check_shape(beta, "beta", {num_requests, heads});
    check_states(states, "the states", num_requests, heads, num_keys, columns);
    check_states(fresh, "the fresh states", num_requests, heads, num_keys, columns);
    at::Tensor out = at::empty({num_requests, heads, columns}, v.options());
    std::vector<const float*> old_data;
    std::vector<float*> fresh_data;
    for (const at::Tensor& state : states) old_data.push_back(state.const_data_ptr<float>());
    for (const at::Tensor& state : fresh) fresh_data.push_back(state.mutable_data_ptr<float>());
    const auto *q_data = q.const_data_ptr<float>(), *k_data = k.const_data_ptr<float>();
    const auto *g_data = g.const_data_ptr<float>(), *beta_data = beta.const_data_ptr<float>();
    for_float_type(v, "v", [&](auto* type) {
        using V = std::remove_pointer_t<decltype(type)>;
        const V* v_data = v.const_data_ptr<V>();
        V* out_data = out.mutable_data_ptr<V>();
        at::parallel_for(0, num_requests * heads, STEP_GRAIN, [&](int64_t begin, int64_t stop) {
            const FlushDenormals flush;
            StepHead head(num_keys, columns);
            for (int64_t task = begin; task < stop; ++task) {
                const int64_t n = task / heads, h = task % heads, key_head = h * key_heads / heads, next = task + 1;
                const float* old = old_data[n] + h * num_keys * columns;
                const float* ahead =
                    next < stop ? old_data[next / heads] + next % heads * num_keys * columns : nullptr;
                const float* key = k_data + n * k.stride(0) + key_head * num_keys;
                head.read(q_data + n * q.stride(0) + key_head * num_keys, key, g_data + n * g.stride(0) + h * num_keys);
                const V* value = v_data + n * v.stride(0) + h * columns;
                const float beta_here = beta_data[n * beta.stride(0) + h];
                V* to = out_data + task * columns;
                int64_t j = 0;
                for (; j + STEP_COLUMNS <= columns; j += STEP_COLUMNS)
                    read_columns<STEP_VECS>(head, old, columns, j, value, beta_here, static_cast<float>(scale), to);
                for (; j < columns; j += LANES)
                    read_rest(head, old, columns, j, static_cast<int>(std::min<int64_t>(LANES, columns - j)), value,
                              beta_here, static_cast<float>(scale), to);
                update(head, old, fresh_data[n] + h * num_keys * columns, columns, key, ahead);
            }
        });
    });
    return out;
}

}  // namespace

LONGPREFILL_OPS(kda_step, m) {
    m.def("kda_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor[] states, Tensor(a!)[] fresh, float scale)"
          " -> Tensor",
          TORCH_FN(step));
}

}  // namespace longprefill
