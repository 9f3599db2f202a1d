// Invariant: false exactly when supported_targets() is empty; the kernels then refuse instead of crashing.
#pragma once

namespace kvq {

bool has_vector_unit();

}  // namespace kvq
