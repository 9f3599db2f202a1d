# CUDA's attention kernels on the host (tests/support/simt/simt.h), under the tests that run on a GPU. Included by tests/tests.cmake
# where CUDA's headers are and no sanitizer slows it further.
find_package(Boost 1.74 REQUIRED COMPONENTS context)

add_library(kvq_kernels_simt STATIC
  tests/support/simt/attend.cc
  tests/support/simt/attend_d128.cc
  tests/support/simt/attend_d192.cc
  tests/support/simt/attend_d256.cc
  tests/support/simt/attend_d64.cc
  tests/support/simt/attend_d80.cc
  tests/support/simt/attend_d96.cc
  tests/support/simt/prefill_d128.cc
  tests/support/simt/prefill_d64.cc)
target_include_directories(kvq_kernels_simt BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/support/simt/overlay)
target_compile_options(kvq_kernels_simt PRIVATE -include ${CMAKE_SOURCE_DIR}/tests/support/simt/cuda_words.h -Wno-unknown-pragmas)
target_compile_definitions(kvq_kernels_simt PRIVATE KVQ_CUDA_HAS_90A)
add_library(kvq_simt STATIC tests/support/simt/runtime.cc tests/support/simt/simt.cc)
foreach(library kvq_kernels_simt kvq_simt)
  target_link_libraries(${library} PUBLIC kvq_contract)
  target_include_directories(${library} PUBLIC ${CMAKE_SOURCE_DIR})
  target_include_directories(${library} SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
endforeach()
target_link_libraries(kvq_simt PRIVATE Boost::context)

add_executable(simt_attend_test
  tests/kernels/cuda/attend_edges_test.cc
  tests/kernels/cuda/attend_early_test.cc
  tests/kernels/cuda/attend_prefill_test.cc
  tests/kernels/cuda/attend_test.cc)
target_link_libraries(simt_attend_test kvq_kernels_simt kvq_simt kvq_oracle GTest::gtest_main)
gtest_discover_tests(simt_attend_test TEST_PREFIX "Simt" DISCOVERY_TIMEOUT 60 PROPERTIES LABELS unit)
