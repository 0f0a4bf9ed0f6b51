// A state's decay in two numbers: P S = kept S + change S.
#pragma once

#include "longprefill/vector.h"

namespace longprefill {
namespace {

// 1 and a small change for slow channels, 0 and the whole factor for others. A factor just below 1 is rounded by up to
// 3e-8; gates that hardly move in time round it to the same side again and again, and a state that forgets next to nothing
// in thousands of tiles adds that up. Where all that is added to a state is summed before it meets the state, the one
// rounding that is left goes either way.
LP_INLINE void split_decay(Vec log_decay, Vec factor, Vec& change, Vec& kept) {
    const IntVec is_slow = log_decay > -EXPM1_LIMIT;
    change = is_slow ? small_expm1(log_decay) : factor;
    kept = is_slow ? splat(1.0f) : Vec{};
}

}  // namespace
}  // namespace longprefill
