# Programs that prove something on a GPU: built wherever CUDA is, run by tools/gpu-check. Included by tests/tests.cmake.
function(kvq_gpu_test name)  # with kernels of its own, perhaps
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES CUDA_ARCHITECTURES "${KVQ_CUDA_ARCHITECTURES}" CUDA_STANDARD 20)
  target_include_directories(${name} PRIVATE ${JSON_INCLUDE})
  target_link_libraries(${name} CUDA::cudart_static)
endfunction()
kvq_gpu_test(gpu_attend_test
  tests/kernels/cuda/append_test.cc
  tests/kernels/cuda/attend_edges_test.cc
  tests/kernels/cuda/attend_prefill_test.cc
  tests/kernels/cuda/attend_test.cc)
kvq_gpu_test(gpu_entries_test tests/kernels/cuda/entries_test.cc)
kvq_gpu_test(gpu_transcode_test tests/kernels/cuda/transcode_errors_test.cc tests/kernels/cuda/transcode_test.cc)
foreach(test attend entries transcode)
  target_link_libraries(gpu_${test}_test kvq_kernels_cuda kvq_oracle GTest::gtest_main)
endforeach()
# The worker's half: slabs, mirrors and jobs, with processes of its own.
kvq_gpu_test(gpu_backend_test
  tests/gpu/backend_jobs_test.cc
  tests/gpu/backend_test.cc
  tests/gpu/backend_times_test.cc
  tests/gpu/device_code.cu
  tests/gpu/exporter_test.cc
  tests/gpu/gpu_test.cc
  tests/support/role_process.cc)
target_link_libraries(gpu_backend_test kvq_bench_rows kvq_gpu_backend kvq_kernels GTest::gtest)
# The device suite over kvqd-gpu, which lies beside it.
kvq_gpu_test(gpu_conformance_test tests/gpu/conformance_test.cc)
target_link_libraries(gpu_conformance_test kvq_device_worker kvq_kernels_cuda GTest::gtest_main)
add_dependencies(gpu_conformance_test kvqd-gpu)
# libkvq, over a daemon of the test's own and over kvqd.
kvq_gpu_test(gpu_client_test
  tests/gpu/client_kernels.cu
  tests/gpu/client_test.cc
  tests/gpu/deaths_test.cc
  tests/gpu/gpu_model.cc
  tests/gpu/node_test.cc)
target_link_libraries(gpu_client_test kvq_test_support kvq_kernels_cuda)
# What kvqd-gpu says where no GPU is, and the files of handles; runs everywhere.
add_executable(kvqd_gpu_test tests/gpu/handle_file_test.cc tests/gpu/worker_program_test.cc)
target_include_directories(kvqd_gpu_test PRIVATE ${CMAKE_SOURCE_DIR})
target_compile_definitions(kvqd_gpu_test PRIVATE KVQD_GPU_PATH="$<TARGET_FILE:kvqd-gpu>")
target_link_libraries(kvqd_gpu_test kvq_gpu_worker kvq_kernels_cuda GTest::gmock_main)
add_dependencies(kvqd_gpu_test kvqd-gpu)
gtest_discover_tests(kvqd_gpu_test PROPERTIES LABELS unit)
# The worker's jobs over a driver that the test makes up; runs everywhere.
add_executable(cuda_jobs_test tests/gpu/cuda_jobs_test.cc daemon/gpu/cuda_context.cc daemon/gpu/cuda_jobs.cc daemon/gpu/nvml.cc)
target_include_directories(cuda_jobs_test PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(cuda_jobs_test kvq_contract kvq_kernels CUDA::cudart_static GTest::gtest_main)
gtest_discover_tests(cuda_jobs_test PROPERTIES LABELS unit)
# Benchmarks.
kvq_gpu_test(kvq_bench_gpu_attend
  tests/bench/gpu_attend/main.cc
  tests/bench/gpu_attend/shapes.cc
  tests/bench/gpu_attend/step.cc
  tests/bench/gpu_attend/timing.cu
  tests/bench/gpu_attend/workload.cc)
target_link_libraries(kvq_bench_gpu_attend kvq_bench_rows kvq_kernels_cuda kvq_oracle)
set_tests_properties(gpu_bench PROPERTIES ENVIRONMENT "KVQ_BENCH_GPU_ATTEND=$<TARGET_FILE:kvq_bench_gpu_attend>")  # its list of shapes
kvq_gpu_test(kvq_bench_gpu_transcode
  tests/bench/bench_gpu_transcode.cc
  tests/bench/gpu_transcode/append.cc
  tests/bench/gpu_transcode/plain_copy.cu)
target_link_libraries(kvq_bench_gpu_transcode kvq_bench_rows kvq_kernels_cuda kvq_kernels)
kvq_gpu_test(kvq_bench_gpu_node
  tests/bench/gpu_node/churner.cc
  tests/bench/gpu_node/decoder.cc
  tests/bench/gpu_node/interference.cc
  tests/bench/gpu_node/latencies.cc
  tests/bench/gpu_node/llama.cc
  tests/bench/gpu_node/main.cc
  tests/bench/gpu_node/million_tokens.cc
  tests/bench/gpu_node/mps_crash.cc
  tests/bench/gpu_node/node.cc
  tests/bench/gpu_node/pacing.cc
  tests/bench/gpu_node/recovery.cc
  tests/bench/gpu_node/reference.cc
  tests/bench/gpu_node/roles.cc
  tests/bench/gpu_node/servers.cc
  tests/bench/gpu_node/source.cc
  tests/bench/gpu_node/step_check.cu
  tests/bench/gpu_node/values.cu)
target_compile_definitions(kvq_bench_gpu_node PRIVATE KVQCTL_PATH="$<TARGET_FILE:kvqctl>")
target_link_libraries(kvq_bench_gpu_node kvq_bench_rows kvq_test_support)
# What tools/gpu-bundle carries: the node's programs and all of the above.
set(KVQ_GPU_PROGRAMS kvqd kvqd-gpu kvqctl kvq-hold kvq gpu_attend_test gpu_entries_test gpu_transcode_test gpu_backend_test
    gpu_client_test gpu_conformance_test kvq_bench_gpu_attend kvq_bench_gpu_transcode kvq_bench_gpu_node)
add_custom_target(gpu_programs DEPENDS ${KVQ_GPU_PROGRAMS})
list(TRANSFORM KVQ_GPU_PROGRAMS REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE KVQ_GPU_FILES)
list(JOIN KVQ_GPU_FILES "\n" KVQ_GPU_FILES)
file(GENERATE OUTPUT gpu_programs.txt CONTENT "${KVQ_GPU_FILES}\n")
