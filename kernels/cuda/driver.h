// The driver's entry points, found when the program runs, so that nothing links libcuda and every program starts
// without one.
//
// Invariant: driver() gives the complete table or an error that names what is missing on this machine; it is asked for
// once, and what it answered first stays. Driver codes and runtime codes have the same numbers, so one function judges
// both.
#pragma once

#include <cuda.h>

#include "kvq/result.h"

namespace kvq::cuda {

// X(member, entry point): the signatures are those of CUDA 12.0, which later drivers keep.
#define KVQ_CUDA_DRIVER(X)                                            \
  X(init, cuInit)                                                     \
  X(device_get, cuDeviceGet)                                          \
  X(device_get_count, cuDeviceGetCount)                               \
  X(device_get_name, cuDeviceGetName)                                 \
  X(device_get_uuid, cuDeviceGetUuid)                                 \
  X(device_get_attribute, cuDeviceGetAttribute)                       \
  X(device_total_mem, cuDeviceTotalMem)                               \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain)                     \
  X(primary_ctx_release, cuDevicePrimaryCtxRelease)                   \
  X(primary_ctx_set_flags, cuDevicePrimaryCtxSetFlags)                \
  X(ctx_set_current, cuCtxSetCurrent)                                 \
  X(ctx_get_current, cuCtxGetCurrent)                                 \
  X(ctx_push_current, cuCtxPushCurrent)                               \
  X(ctx_pop_current, cuCtxPopCurrent)                                 \
  X(ctx_get_device, cuCtxGetDevice)                                   \
  X(ctx_get_id, cuCtxGetId)                                           \
  X(ctx_set_limit, cuCtxSetLimit)                                     \
  X(ctx_synchronize, cuCtxSynchronize)                                \
  X(stream_create_with_priority, cuStreamCreateWithPriority)          \
  X(stream_destroy, cuStreamDestroy)                                  \
  X(stream_query, cuStreamQuery)                                      \
  X(stream_synchronize, cuStreamSynchronize)                          \
  X(stream_is_capturing, cuStreamIsCapturing)                         \
  X(stream_write_value64, cuStreamWriteValue64)                       \
  X(stream_batch_mem_op, cuStreamBatchMemOp)                          \
  X(event_create, cuEventCreate)                                      \
  X(event_destroy, cuEventDestroy)                                    \
  X(event_query, cuEventQuery)                                        \
  X(event_record, cuEventRecord)                                      \
  X(mem_get_info, cuMemGetInfo)                                       \
  X(mem_get_allocation_granularity, cuMemGetAllocationGranularity)    \
  X(mem_create, cuMemCreate)                                          \
  X(mem_release, cuMemRelease)                                        \
  X(mem_export_to_shareable_handle, cuMemExportToShareableHandle)     \
  X(mem_import_from_shareable_handle, cuMemImportFromShareableHandle) \
  X(mem_address_reserve, cuMemAddressReserve)                         \
  X(mem_address_free, cuMemAddressFree)                               \
  X(mem_map, cuMemMap)                                                \
  X(mem_unmap, cuMemUnmap)                                            \
  X(mem_set_access, cuMemSetAccess)                                   \
  X(mem_alloc, cuMemAlloc)                                            \
  X(mem_free, cuMemFree)                                              \
  X(ipc_get_mem_handle, cuIpcGetMemHandle)                            \
  X(ipc_open_mem_handle, cuIpcOpenMemHandle)                          \
  X(ipc_close_mem_handle, cuIpcCloseMemHandle)                        \
  X(mem_host_register, cuMemHostRegister)                             \
  X(mem_host_unregister, cuMemHostUnregister)                         \
  X(mem_host_get_device_pointer, cuMemHostGetDevicePointer)           \
  X(memcpy_dtoh, cuMemcpyDtoH)                                        \
  X(memset_d8_async, cuMemsetD8Async)

struct Driver {
  int version = 0;  // 13000 = CUDA 13.0
#define KVQ_CUDA_MEMBER(member, entry) decltype(&::entry) member = nullptr;
  KVQ_CUDA_DRIVER(KVQ_CUDA_MEMBER)
#undef KVQ_CUDA_MEMBER
};

// Errors (system): no libcuda, a driver that is older than this build's CUDA (both versions are named), an entry point
// that it lacks, no GPU. Makes no context.
Result<const Driver*> driver();

// Whether nothing works any more in this context, and often in this process: it ends, and another takes over.
bool is_context_lost(int native);

// What a driver's or the runtime's code means for kvq: no_memory, context_lost or system; `what` is static text.
Error driver_error(int native, const char* what);

// The driver's own words for a code, static; for logs. Works without a driver.
const char* driver_text(int native);

}  // namespace kvq::cuda
