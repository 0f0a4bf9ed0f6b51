// KDA prefill: outputs and states of packed segments, and summaries [E | M]. Derivation: ../README.md.
//
// Legend: T tokens, H q/k heads, G value heads, K key dim, V value dim, N segments, C tokens a tile. A state is kept panel
// by panel, [panels, K, PANEL].
#include <cstdlib>
#include <memory>
#include <tuple>
#include <vector>

#include "longprefill/torch.h"
#include "panel.h"

namespace longprefill {
namespace {

constexpr int64_t ZERO_CHECK_TILES = 4;  // how often a summary looks whether columns of M are exactly zero

struct Free {
    void operator()(float* memory) const { std::free(memory); }
};
typedef std::unique_ptr<float, Free> Memory;

Memory allocate(int64_t floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    auto* memory = static_cast<float*>(std::aligned_alloc(64, bytes));
    TORCH_CHECK(memory != nullptr, "no memory for ", bytes, " bytes of work space");
    return Memory(memory);
}

struct Shape {
    int64_t num_tokens, heads, key_heads, num_keys, num_values, padded_keys, value_panels;

    Shape(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta)
        : num_tokens(v.size(0)), heads(v.size(1)), key_heads(k.size(1)), num_keys(k.size(2)), num_values(v.size(2)),
          padded_keys(padded(num_keys, BLOCK)), value_panels((num_values + PANEL - 1) / PANEL) {
        check_fp32(q, "q"), check_fp32(k, "k"), check_fp32(g, "g"), check_fp32(beta, "beta");
        check_rows_contiguous(q, "q"), check_rows_contiguous(k, "k"), check_rows_contiguous(v, "v");
        check_rows_contiguous(g, "g"), check_rows_contiguous(beta, "beta");
        TORCH_CHECK_VALUE(num_keys <= MAX_KEYS, "key dim ", num_keys, ": at most ", MAX_KEYS);
        TORCH_CHECK_VALUE(key_heads > 0 && heads % key_heads == 0, heads, " value heads, ", key_heads,
                          " q/k heads: value heads must be a multiple");
        check_dim(v, "v", 3), check_shape(k, "k", {num_tokens, key_heads, num_keys}), check_shape(q, "q", k.sizes());
        check_shape(g, "g", {num_tokens, heads, num_keys}), check_shape(beta, "beta", {num_tokens, heads});
    }

    template <typename V>
    HeadInputs<V> inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                         const at::Tensor& beta, int64_t first_row, int64_t head, V* out = nullptr) const {
        const int64_t key_head = head * key_heads / heads;
        HeadInputs<V> in{};
        in.q_row = q.stride(0), in.k_row = k.stride(0), in.v_row = v.stride(0), in.g_row = g.stride(0);
        in.beta_row = beta.stride(0);
        in.q = q.const_data_ptr<float>() + first_row * in.q_row + key_head * num_keys;
        in.k = k.const_data_ptr<float>() + first_row * in.k_row + key_head * num_keys;
        in.g = g.const_data_ptr<float>() + first_row * in.g_row + head * num_keys;
        in.beta = beta.const_data_ptr<float>() + first_row * in.beta_row + head;
        in.v = v.const_data_ptr<V>() + first_row * in.v_row + head * num_values;
        in.out_row = heads * num_values;
        in.out = out == nullptr ? nullptr : out + first_row * in.out_row + head * num_values;
        return in;
    }
};

// Heads of one segment that a thread takes through the rows together. A token's row of all heads is one or two pages of
// memory: head after head, every tile would walk the page tables anew for each of its rows.
// Their states are 64 KiB a head at K = V = 128, in a summary twice that; where there is AVX-512, they stay in L2.
constexpr int64_t SCAN_HEADS = 8, SUMMARY_HEADS = LANES == 16 ? 4 : 8;
struct HeadGroup {
    int64_t segment, first, count;
};

std::vector<HeadGroup> head_groups(int64_t num_segments, int64_t heads, int64_t most) {
    const int64_t threads = at::get_num_threads();
    const int64_t wanted = (num_segments * heads + threads - 1) / std::max<int64_t>(1, threads);
    const int64_t size = std::max<int64_t>(1, std::min(most, wanted));
    std::vector<HeadGroup> groups;
    for (int64_t segment = 0; segment < num_segments; ++segment)
        for (int64_t first = 0; first < heads; first += size)
            groups.push_back({segment, first, std::min(size, heads - first)});
    return groups;
}

// What follows tile `row` of head `i` of a group: the next head's rows, or the first head's next tile.
template <typename V>
Ahead next_tile(const std::vector<HeadInputs<V>>& inputs, int64_t i, int64_t row, int64_t length, const Shape& shape,
                bool with_queries) {
    const bool last = i + 1 == static_cast<int64_t>(inputs.size());
    const int64_t next_row = last ? row + C : row;
    if (next_row >= length) return Ahead();
    return Ahead(inputs[last ? 0 : i + 1], next_row, std::min(C, length - next_row), shape.num_keys, shape.num_values,
                 with_queries);
}

// A state that is wanted before row `row` of its segment, and its place in the result.
struct Stop {
    int64_t row, place;
};

// The stops of every segment in order of rows.
std::vector<std::vector<Stop>> stops_by_segment(at::IntArrayRef offsets, at::IntArrayRef segments, at::IntArrayRef rows) {
    const int64_t num_segments = static_cast<int64_t>(offsets.size()) - 1;
    TORCH_CHECK_VALUE(segments.size() == rows.size(), "interior states in ", segments.size(), " segments, but after ",
                      rows.size(), " numbers of rows: must be as many");
    std::vector<std::vector<Stop>> stops(num_segments);
    for (size_t i = 0; i < rows.size(); ++i) {
        TORCH_CHECK_VALUE(segments[i] >= 0 && segments[i] < num_segments, "interior state of segment ", segments[i],
                          ": there are ", num_segments, ", from 0 on");
        const int64_t length = offsets[segments[i] + 1] - offsets[segments[i]];
        TORCH_CHECK_VALUE(rows[i] % C == 0 && rows[i] >= 0 && rows[i] <= length, "interior state after ", rows[i],
                          " rows of segment ", segments[i], ": must be a multiple of ", C, " within its ", length);
        stops[segments[i]].push_back({rows[i], static_cast<int64_t>(i)});
    }
    for (auto& of_segment : stops)
        std::sort(of_segment.begin(), of_segment.end(), [](const Stop& a, const Stop& b) { return a.row < b.row; });
    return stops;
}

// Outputs, the state after each segment, and those before rows `interior_rows` of segments `interior_segments`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> scan(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const at::Tensor& g, const at::Tensor& beta, at::IntArrayRef offsets,
                                        double scale, const std::optional<at::Tensor>& initial,
                                        at::IntArrayRef interior_segments, at::IntArrayRef interior_rows) {
    const Shape shape(q, k, v, g, beta);
    const int64_t num_segments = static_cast<int64_t>(offsets.size()) - 1, state_size = shape.num_keys * shape.num_values;
    at::Tensor out = at::empty(v.sizes(), v.options());
    at::Tensor states = at::empty({num_segments, shape.heads, shape.num_keys, shape.num_values}, q.options());
    at::Tensor interior = at::empty({static_cast<int64_t>(interior_rows.size()), shape.heads, shape.num_keys,
                                     shape.num_values}, q.options());
    const auto stops = stops_by_segment(offsets, interior_segments, interior_rows);
    if (initial) check_whole(*initial, "initial", states.sizes());
    const float* initial_data = initial ? initial->const_data_ptr<float>() : nullptr;
    float *states_data = states.mutable_data_ptr<float>(), *interior_data = interior.mutable_data_ptr<float>();
    for_float_type(v, "v", [&](auto* type) {
        using V = std::remove_pointer_t<decltype(type)>;
        V* out_data = out.mutable_data_ptr<V>();
        const std::vector<HeadGroup> groups = head_groups(num_segments, shape.heads, SCAN_HEADS);
        at::parallel_for(0, static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t end) {
            const FlushDenormals flush;
            const int64_t panel_size = shape.padded_keys * PANEL, state_floats = shape.value_panels * panel_size;
            const Memory memory = allocate(Tile::floats(shape.padded_keys) + C * PANEL + SCAN_HEADS * state_floats);
            Tile tile;
            tile.place(memory.get(), shape.padded_keys);
            float* delta = memory.get() + Tile::floats(shape.padded_keys);
            float* states_of_group = delta + C * PANEL;
            for (int64_t task = begin; task < end; ++task) {
                const HeadGroup& group = groups[task];
                const int64_t start = offsets[group.segment], length = offsets[group.segment + 1] - start;
                const int64_t first_state = group.segment * shape.heads + group.first;
                std::vector<HeadInputs<V>> inputs;
                for (int64_t i = 0; i < group.count; ++i) {
                    inputs.push_back(shape.inputs<V>(q, k, v, g, beta, start, group.first + i, out_data));
                    import_state(states_of_group + i * state_floats,
                                 initial_data ? initial_data + (first_state + i) * state_size : nullptr,
                                 shape.num_keys, shape.padded_keys, shape.num_values);
                }
                const auto export_group = [&](float* to) {
                    for (int64_t i = 0; i < group.count; ++i)
                        export_state(states_of_group + i * state_floats, to + i * state_size, shape.num_keys,
                                     shape.padded_keys, shape.num_values);
                };
                auto stop = stops[group.segment].begin();
                const auto export_interior = [&](int64_t row) {
                    for (; stop != stops[group.segment].end() && stop->row == row; ++stop)
                        export_group(interior_data + (stop->place * shape.heads + group.first) * state_size);
                };
                for (int64_t row = 0; row < length; row += C) {
                    export_interior(row);
                    for (int64_t i = 0; i < group.count; ++i) {
                        const HeadInputs<V>& in = inputs[i];
                        const int64_t count = std::min(C, length - row);
                        Ahead ahead = next_tile(inputs, i, row, length, shape, true);
                        make_tile<true>(tile, in, row, count, shape.num_keys, static_cast<float>(scale));
                        for (int64_t panel = 0; panel < shape.value_panels; ++panel) {
                            const int64_t column = panel * PANEL, columns = shape.num_values - column;
                            float* state = states_of_group + i * state_floats + panel * panel_size;
                            right_side(tile, state, in.v + row * in.v_row + column, in.v_row, count, columns, delta,
                                       ahead);
                            solve(tile, delta);
                            outputs(tile, state, delta, count, columns, in.out + row * in.out_row + column, in.out_row,
                                    ahead);
                            advance(tile, state, delta, ahead);
                        }
                    }
                }
                export_interior(length);
                export_group(states_data + first_state * state_size);
            }
        });
    });
    return {out, states, interior};
}

// [E | M] of rows [start, end): E [G, K, V], M [G, K, K], and per head whether M is not exactly zero. With an initial
// state E is the true final state and M is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor> summarize(const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                                                         const at::Tensor& beta, int64_t start, int64_t end,
                                                         const std::optional<at::Tensor>& initial) {
    const Shape shape(k, k, v, g, beta);
    const bool with_transition = !initial;
    const int64_t state_size = shape.num_keys * shape.num_values;
    at::Tensor states = at::empty({shape.heads, shape.num_keys, shape.num_values}, k.options());
    if (initial) check_whole(*initial, "initial", states.sizes());
    at::Tensor transitions = at::empty({with_transition ? shape.heads : 0, shape.num_keys, shape.num_keys}, k.options());
    at::Tensor is_there = at::empty({shape.heads}, k.options().dtype(at::kBool));
    const float* initial_data = initial ? initial->const_data_ptr<float>() : nullptr;
    float *states_data = states.mutable_data_ptr<float>(), *transitions_data = transitions.mutable_data_ptr<float>();
    bool* is_there_data = is_there.mutable_data_ptr<bool>();
    for_float_type(v, "v", [&](auto* type) {
        using V = std::remove_pointer_t<decltype(type)>;
        const std::vector<HeadGroup> groups = head_groups(1, shape.heads, SUMMARY_HEADS);
        at::parallel_for(0, static_cast<int64_t>(groups.size()), 1, [&](int64_t begin, int64_t stop) {
            const FlushDenormals flush;
            const int64_t panel_size = shape.padded_keys * PANEL;
            const int64_t key_panels = with_transition ? (shape.num_keys + PANEL - 1) / PANEL : 0;
            const int64_t panels = shape.value_panels + key_panels, head_floats = panels * panel_size;
            const Memory memory = allocate(Tile::floats(shape.padded_keys) + C * PANEL + SUMMARY_HEADS * head_floats);
            Tile tile;
            tile.place(memory.get(), shape.padded_keys);
            float* delta = memory.get() + Tile::floats(shape.padded_keys);
            float* states_of_group = delta + C * PANEL;
            for (int64_t task = begin; task < stop; ++task) {
                const HeadGroup& group = groups[task];
                std::vector<HeadInputs<V>> inputs;
                std::vector<char> is_zero_panel(group.count * panels);
                for (int64_t i = 0; i < group.count; ++i) {
                    inputs.push_back(shape.inputs<V>(k, k, v, g, beta, start, group.first + i));
                    float* state = states_of_group + i * head_floats;
                    float* transition = state + shape.value_panels * panel_size;
                    import_state(state, initial_data ? initial_data + (group.first + i) * state_size : nullptr,
                                 shape.num_keys, shape.padded_keys, shape.num_values);
                    import_state(transition, nullptr, 0, shape.padded_keys, with_transition ? shape.num_keys : 0);
                    for (int64_t c = 0; c < (with_transition ? shape.num_keys : 0); ++c)
                        transition[c / PANEL * panel_size + c * PANEL + c % PANEL] = 1;
                }
                int64_t index = 0;
                for (int64_t row = 0; row < end - start; row += C) {
                    const int64_t count = std::min(C, end - start - row);
                    const bool looks = ++index % ZERO_CHECK_TILES == 0;
                    for (int64_t i = 0; i < group.count; ++i) {
                        const HeadInputs<V>& in = inputs[i];
                        Ahead ahead = next_tile(inputs, i, row, end - start, shape, false);
                        make_tile<false>(tile, in, row, count, shape.num_keys, 0.0f);
                        for (int64_t panel = 0; panel < panels; ++panel) {
                            char& is_zero_here = is_zero_panel[i * panels + panel];
                            if (is_zero_here) continue;
                            const int64_t column = panel * PANEL;
                            const bool has_values = panel < shape.value_panels;
                            float* state = states_of_group + i * head_floats + panel * panel_size;
                            right_side(tile, state, has_values ? in.v + row * in.v_row + column : nullptr, in.v_row,
                                       count, shape.num_values - column, delta, ahead);
                            solve(tile, delta);
                            advance(tile, state, delta, ahead);
                            is_zero_here = looks && !has_values && is_zero(state, panel_size);
                        }
                    }
                }
                for (int64_t i = 0; i < group.count; ++i) {
                    const float* state = states_of_group + i * head_floats;
                    const float* transition = state + shape.value_panels * panel_size;
                    const int64_t head = group.first + i;
                    export_state(state, states_data + head * state_size, shape.num_keys, shape.padded_keys,
                                 shape.num_values);
                    if (with_transition)
                        export_state(transition, transitions_data + head * shape.num_keys * shape.num_keys,
                                     shape.num_keys, shape.padded_keys, shape.num_keys);
                    is_there_data[head] = with_transition && !is_zero(transition, key_panels * panel_size);
                }
            }
        });
    });
    return {states, transitions, is_there};
}

// Log decay, fp32, from x [T, G, K], slope = exp(A_log) [G], bias [G, K].
at::Tensor gate(const at::Tensor& x, const at::Tensor& slope, const at::Tensor& bias,
                std::optional<double> lower_bound) {
    check_dim(x, "x", 3), check_rows_contiguous(x, "x");
    const int64_t heads = x.size(1), keys = x.size(2), row = x.stride(0);
    check_whole(slope, "a_log", {heads}), check_whole(bias, "dt_bias", {heads, keys});
    at::Tensor out = at::empty(x.sizes(), slope.options());
    const float *slopes = slope.const_data_ptr<float>(), *biases = bias.const_data_ptr<float>();
    float* out_data = out.mutable_data_ptr<float>();
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* x_data = x.const_data_ptr<T>();
        at::parallel_for(0, x.size(0), 8, [&](int64_t begin, int64_t stop) {
            for (int64_t t = begin; t < stop; ++t)
                for (int64_t head = 0; head < heads; ++head) {
                    const T* from = x_data + t * row + head * keys;
                    float* to = out_data + (t * heads + head) * keys;
                    for_each_vector(keys, [&](int64_t c, int count) {
                        const Vec shifted = load_some(from + c, count) + load_some(biases + head * keys + c, count);
                        const Vec decay = lower_bound
                                              ? sigmoid(shifted * slopes[head]) * static_cast<float>(*lower_bound)
                                              : softplus(shifted) * -slopes[head];
                        store_some(to + c, decay, count);
                    });
                }
        });
    });
    return out;
}

at::Tensor l2_normalize(const at::Tensor& x, double eps) {
    check_dim(x, "x", 3), check_rows_contiguous(x, "x");
    const int64_t heads = x.size(1), keys = x.size(2), row = x.stride(0);
    at::Tensor out = at::empty(x.sizes(), x.options().dtype(at::kFloat));
    float* out_data = out.mutable_data_ptr<float>();
    for_float_type(x, "x", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* x_data = x.const_data_ptr<T>();
        at::parallel_for(0, x.size(0), 8, [&](int64_t begin, int64_t stop) {
            for (int64_t t = begin; t < stop; ++t)
                for (int64_t head = 0; head < heads; ++head) {
                    const T* from = x_data + t * row + head * keys;
                    float* to = out_data + (t * heads + head) * keys;
                    Vec squares{};
                    for_each_vector(keys, [&](int64_t c, int count) {
                        const Vec value = load_some(from + c, count);
                        squares += value * value;
                    });
                    const float inverse = 1.0f / __builtin_sqrtf(sum(squares) + static_cast<float>(eps));
                    for_each_vector(keys, [&](int64_t c, int count) {
                        store_some(to + c, load_some(from + c, count) * inverse, count);
                    });
                }
        });
    });
    return out;
}

}  // namespace

LONGPREFILL_OPS(kda, m) {
    m.def("kda_scan(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int[] offsets, float scale, Tensor? initial, "
          "int[] interior_segments, int[] interior_rows) -> (Tensor, Tensor, Tensor)",
          TORCH_FN(scan));
    m.def("kda_summarize(Tensor k, Tensor v, Tensor g, Tensor beta, int start, int end, Tensor? initial) -> "
          "(Tensor, Tensor, Tensor)",
          TORCH_FN(summarize));
    m.def("kda_gate(Tensor x, Tensor slope, Tensor bias, float? lower_bound) -> Tensor", TORCH_FN(gate));
    m.def("kda_l2_normalize(Tensor x, float eps) -> Tensor", TORCH_FN(l2_normalize));
}

}  // namespace longprefill
