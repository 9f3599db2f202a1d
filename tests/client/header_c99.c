/* kvq.h must compile as C99 without extensions and be usable from C: this file is built, never run. */
#include "kvq/kvq.h"

kvq_status kvq_header_c99(kvq_model* model, uint64_t* step);

kvq_status kvq_header_c99(kvq_model* model, uint64_t* step) {
  kvq_attend_args args = {0};
  args.size = sizeof args;
  args.window = -1;
  if (kvq_step_begin(model, step) != KVQ_OK) return KVQ_ERR_LIMIT_REACHED;
  (void)kvq_attend(model, &args);
  kvq_fault fault = {0};
  fault.size = sizeof fault;
  if (kvq_get_fault(model, &fault) != KVQ_OK || fault.status == KVQ_ERR_CONTEXT_LOST) return fault.status;
  return kvq_step_end(model, *step, NULL);
}
