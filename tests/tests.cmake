# Tests and benchmarks: which program each is, what it links, and how ctest labels it. Included by the root CMake file, so paths are from there.
enable_testing()
include(GoogleTest)
find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
add_test(NAME tidy COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/tidy_test.py)
set_tests_properties(tidy PROPERTIES LABELS tidy)
add_test(NAME gpu_check COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/gpu_check_test.py)
add_test(NAME gpu_bench COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/gpu_bench_test.py)
add_test(NAME versions COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/versions_test.py)
set_tests_properties(gpu_check gpu_bench versions PROPERTIES LABELS unit)
find_program(SYSTEMD_ANALYZE systemd-analyze)
if(SYSTEMD_ANALYZE)  # it wants the program to exist, so the copy that is verified runs another; man_test.py checks the pages
  string(REPLACE /usr/bin/kvqd /bin/true KVQD_SERVICE_VERIFIED "${KVQD_SERVICE}")
  foreach(drop_in none metrics gpu)  # the unit alone, and with each that is shipped
    set(units units/${drop_in})
    file(CONFIGURE OUTPUT ${units}/kvqd.service CONTENT "${KVQD_SERVICE_VERIFIED}" @ONLY)
    configure_file(systemd/kvqd.socket ${units}/kvqd.socket COPYONLY)
    if(NOT drop_in STREQUAL none)
      configure_file(systemd/kvqd-${drop_in}.conf ${units}/kvqd.service.d/${drop_in}.conf COPYONLY)
    endif()
    add_test(NAME systemd_units_${drop_in} COMMAND ${SYSTEMD_ANALYZE} verify --man=no ${units}/kvqd.service ${units}/kvqd.socket)
    set_tests_properties(systemd_units_${drop_in} PROPERTIES LABELS unit WORKING_DIRECTORY ${CMAKE_BINARY_DIR} FAIL_REGULAR_EXPRESSION "kvqd")
  endforeach()
endif()
if(SYSTEMD_ANALYZE)
  add_test(NAME systemd_exposure COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/exposure_test.py ${SYSTEMD_ANALYZE})
  set_tests_properties(systemd_exposure PROPERTIES LABELS unit)
endif()
add_test(NAME manual COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/man_test.py $<TARGET_FILE:kvqd> $<TARGET_FILE:kvq-hold>)
set_tests_properties(manual PROPERTIES LABELS unit)
add_test(NAME prometheus COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/prometheus_test.py $<TARGET_FILE:kvqd> ${CMAKE_SOURCE_DIR})
set_tests_properties(prometheus PROPERTIES LABELS multiprocess SKIP_RETURN_CODE 77)
add_test(NAME example_config COMMAND kvqd --config ${CMAKE_SOURCE_DIR}/systemd/kvqd.toml --check-config)
set_tests_properties(example_config PROPERTIES LABELS unit)
# Python drives the installed form: the shared library of this build, real processes, a real model.
if(NOT KVQ_SANITIZE AND EXISTS ${CMAKE_SOURCE_DIR}/.venv/bin/python)
  add_test(NAME python COMMAND ${CMAKE_SOURCE_DIR}/.venv/bin/python -m pytest ${CMAKE_SOURCE_DIR}/client/python/tests)
  set_tests_properties(python PROPERTIES LABELS python WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/client/python)
endif()
# What the tsan preset builds: every test that is labelled threads beside its kind. gtest_discover_tests (with TEST_LIST names) cannot
# set two labels, so this does, after it.
add_custom_target(threads_tests)
function(kvq_threads_too target test_list kind)
  add_dependencies(threads_tests ${target})
  set(labels ${CMAKE_BINARY_DIR}/${test_list}_labels.cmake)
  file(WRITE ${labels} "if(${test_list})\n  set_tests_properties(\${${test_list}} PROPERTIES LABELS \"${kind};threads\")\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels})
endfunction()
add_executable(event_loop_test tests/loop/event_loop_test.cc)
target_link_libraries(event_loop_test kvq_loop GTest::gtest_main)
gtest_discover_tests(event_loop_test TEST_LIST event_loop_tests)
kvq_threads_too(event_loop_test event_loop_tests unit)
add_executable(config_test tests/config_edit_test.cc tests/config_test.cc)
target_compile_definitions(config_test PRIVATE KVQ_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
target_link_libraries(config_test kvq_config GTest::gmock_main)
gtest_discover_tests(config_test PROPERTIES LABELS unit)
add_executable(limits_test tests/limits_test.cc)
target_link_libraries(limits_test kvq_startup GTest::gmock_main)
gtest_discover_tests(limits_test PROPERTIES LABELS unit)
add_executable(listen_socket_test tests/listen_socket_test.cc)
target_link_libraries(listen_socket_test kvq_startup kvq_keeper GTest::gmock_main)
gtest_discover_tests(listen_socket_test PROPERTIES LABELS multiprocess)
add_executable(keeper_test tests/gpu_list_test.cc tests/keeper_test.cc daemon/gpu_list.cc daemon/make_store.cc)
target_link_libraries(keeper_test kvq_keeper kvq_startup kvq_store kvq_device_host kvq_device_worker GTest::gmock_main)
gtest_discover_tests(keeper_test PROPERTIES LABELS multiprocess)
add_executable(metrics_test tests/metrics/metrics_server_test.cc tests/metrics/node_metrics_test.cc tests/support/scrape.cc)
target_link_libraries(metrics_test kvq_metrics kvq_startup GTest::gtest_main)
gtest_discover_tests(metrics_test PROPERTIES LABELS unit)
foreach(test session admin devices events lists operator resume limits hostile babble ticker)
  add_executable(rpc_${test}_test tests/rpc/${test}_test.cc)
  target_include_directories(rpc_${test}_test PRIVATE ${JSON_INCLUDE})
  target_link_libraries(rpc_${test}_test kvq_rpc GTest::gtest_main)
  gtest_discover_tests(rpc_${test}_test PROPERTIES LABELS unit)
endforeach()
foreach(test lists operator)
  target_link_libraries(rpc_${test}_test kvqctl_view)  # what the documents look like
endforeach()
foreach(test bench daemon kvqctl save)
  add_executable(e2e_${test}_test tests/e2e/${test}_test.cc)
  target_include_directories(e2e_${test}_test PRIVATE ${CMAKE_SOURCE_DIR} ${JSON_INCLUDE})
  target_compile_definitions(e2e_${test}_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>")
  target_link_libraries(e2e_${test}_test GTest::gtest_main)
  add_dependencies(e2e_${test}_test kvqd kvqctl)
  gtest_discover_tests(e2e_${test}_test PROPERTIES LABELS multiprocess)
endforeach()
target_sources(e2e_bench_test PRIVATE tools/kvq-bench/content.cc)
target_compile_definitions(e2e_bench_test PRIVATE KVQ_LOAD_PATH="$<TARGET_FILE:kvq_load>")
add_dependencies(e2e_bench_test kvq-bench kvq_load)
add_executable(kvqctl_view_test tests/e2e/doctor_test.cc tests/e2e/top_model_test.cc)
target_link_libraries(kvqctl_view_test kvqctl_view GTest::gmock_main)
gtest_discover_tests(kvqctl_view_test PROPERTIES LABELS unit)
add_test(NAME kvqctl_completion COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/e2e/completion_test.py $<TARGET_FILE:kvqctl>)
set_tests_properties(kvqctl_completion PROPERTIES LABELS unit)
add_executable(fake_daemon tests/e2e/fake_daemon.cc)
add_executable(e2e_reload_test tests/e2e/reload_test.cc)
target_include_directories(e2e_reload_test PRIVATE ${CMAKE_SOURCE_DIR})
target_compile_definitions(e2e_reload_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>")
target_link_libraries(e2e_reload_test GTest::gtest_main)
add_dependencies(e2e_reload_test kvqd kvqctl)
gtest_discover_tests(e2e_reload_test PROPERTIES LABELS multiprocess)
add_executable(status_line_test daemon/status_line.cc tests/status_line_test.cc)
target_link_libraries(status_line_test kvq_rpc GTest::gtest_main)
gtest_discover_tests(status_line_test PROPERTIES LABELS unit)
add_executable(e2e_holder_test tests/e2e/holder_test.cc tests/e2e/holder_kvqd_test.cc)
target_include_directories(e2e_holder_test PRIVATE ${CMAKE_SOURCE_DIR})
target_compile_definitions(e2e_holder_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>"
                           KVQ_HOLD_PATH="$<TARGET_FILE:kvq-hold>" FAKE_DAEMON_PATH="$<TARGET_FILE:fake_daemon>")
target_link_libraries(e2e_holder_test GTest::gtest_main)
add_dependencies(e2e_holder_test kvqd kvqctl kvq-hold fake_daemon)
gtest_discover_tests(e2e_holder_test PROPERTIES LABELS multiprocess)
add_executable(kvq_kernels_test
  tests/kernels/attend_errors_test.cc
  tests/kernels/attend_test.cc
  tests/kernels/bounds_test.cc
  tests/kernels/int4_codec_test.cc
  tests/kernels/page_index_test.cc
  tests/kernels/page_sum_test.cc
  tests/kernels/logit_noise_test.cc
  tests/kernels/transcode_test.cc)
target_link_libraries(kvq_kernels_test kvq_oracle GTest::gtest_main)
gtest_discover_tests(kvq_kernels_test PROPERTIES LABELS unit)
# The result files of benchmarks.
add_library(kvq_bench_rows STATIC tests/bench/rows.cc)
target_include_directories(kvq_bench_rows PUBLIC ${CMAKE_SOURCE_DIR} ${JSON_INCLUDE})
add_executable(bench_rows_test tests/bench/rows_test.cc)
target_link_libraries(bench_rows_test kvq_bench_rows GTest::gtest_main)
gtest_discover_tests(bench_rows_test PROPERTIES LABELS unit)
add_executable(kvq_bench_kernels tests/bench/bench_kernels.cc)
target_link_libraries(kvq_bench_kernels kvq_kernels benchmark::benchmark)
add_executable(kvq_client_test
  tests/client/abi_test.cc
  tests/client/device_test.cc
  tests/client/header_c99.c
  tests/client/prefix_keys_test.cc
  tests/client/segment_test.cc
  tests/client/tenant_memory_test.cc)
set_source_files_properties(tests/client/header_c99.c PROPERTIES COMPILE_OPTIONS "-std=c99;-pedantic;-Werror")
target_link_libraries(kvq_client_test kvq_client GTest::gtest_main)
gtest_discover_tests(kvq_client_test PROPERTIES LABELS unit)
add_executable(kvq_exports_test tests/client/exports_test.cc)
target_compile_definitions(kvq_exports_test PRIVATE LIBKVQ_PATH="$<TARGET_FILE:kvq>"
                           SYMBOL_LIST_PATH="${CMAKE_SOURCE_DIR}/tests/client/exports.txt")
target_link_libraries(kvq_exports_test GTest::gtest_main)
add_dependencies(kvq_exports_test kvq)
gtest_discover_tests(kvq_exports_test PROPERTIES LABELS unit)
# Real processes around a real daemon.
add_library(kvq_test_support STATIC
  tests/support/accounts.cc
  tests/support/daemon_process.cc
  tests/support/held_daemon.cc
  tests/support/fake_daemon.cc
  tests/support/page_bytes.cc
  tests/support/raw_session.cc
  tests/support/role_process.cc
  tests/support/tiny_model.cc)
target_compile_definitions(kvq_test_support PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQ_HOLD_PATH="$<TARGET_FILE:kvq-hold>")
target_include_directories(kvq_test_support PRIVATE ${JSON_INCLUDE})
target_link_libraries(kvq_test_support PUBLIC kvq_client kvq_oracle GTest::gtest)
add_dependencies(kvq_test_support kvqd kvq-hold)
add_executable(kvq_load tests/e2e/load.cc)
target_link_libraries(kvq_load kvq_test_support)
add_test(NAME kvqctl_top COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/e2e/top_test.py $<TARGET_FILE:kvqd> $<TARGET_FILE:kvqctl>
         $<TARGET_FILE:kvq_load>)
add_test(NAME kvqctl_documents COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/e2e/documents_test.py $<TARGET_FILE:kvqd> $<TARGET_FILE:kvqctl>
         $<TARGET_FILE:kvq_load>)
set_tests_properties(kvqctl_top kvqctl_documents PROPERTIES LABELS multiprocess)
add_executable(kvq_multiprocess_test
  tests/multiprocess/adopt_test.cc
  tests/multiprocess/attach_test.cc
  tests/multiprocess/chaos_test.cc
  tests/multiprocess/chaos_worker.cc
  tests/multiprocess/death_test.cc
  tests/multiprocess/device_test.cc
  tests/multiprocess/gone_test.cc
  tests/multiprocess/isolation_test.cc
  tests/multiprocess/kill_matrix_test.cc
  tests/multiprocess/limits_test.cc
  tests/multiprocess/main.cc
  tests/multiprocess/matrix_worker.cc
  tests/multiprocess/readers_moving_test.cc
  tests/multiprocess/readers_test.cc
  tests/multiprocess/reconnect_calls_test.cc
  tests/multiprocess/reconnect_test.cc
  tests/multiprocess/reconnect_threads_test.cc
  tests/multiprocess/threads_test.cc
  tests/multiprocess/views_test.cc)
target_link_libraries(kvq_multiprocess_test kvq_test_support)
set(KVQ_TSAN "TSAN_OPTIONS=die_after_fork=0:suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp")
gtest_discover_tests(kvq_multiprocess_test TEST_FILTER "-Threads.*:Death.*:*KillMatrix*:Chaos.*" DISCOVERY_TIMEOUT 60
                     PROPERTIES LABELS multiprocess ENVIRONMENT ${KVQ_TSAN})
gtest_discover_tests(kvq_multiprocess_test TEST_FILTER "Threads.*" DISCOVERY_TIMEOUT 60 TEST_LIST kvq_thread_tests
                     PROPERTIES ENVIRONMENT ${KVQ_TSAN})
kvq_threads_too(kvq_multiprocess_test kvq_thread_tests multiprocess)
gtest_discover_tests(kvq_multiprocess_test TEST_FILTER "Death.*:*KillMatrix*:Chaos.*" DISCOVERY_TIMEOUT 60 TEST_LIST kvq_death_tests
                     PROPERTIES LABELS death)
# What a node must bear: hostile peers, limits of the machine, other versions.
add_executable(kvq_hardship_test
  tests/multiprocess/attacker.cc
  tests/multiprocess/decoder.cc
  tests/multiprocess/hostile_test.cc
  tests/multiprocess/main.cc
  tests/multiprocess/relay.cc
  tests/multiprocess/resources_test.cc
  tests/multiprocess/upgrade_test.cc)
target_include_directories(kvq_hardship_test PRIVATE ${JSON_INCLUDE})
target_compile_definitions(kvq_hardship_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>"
                           KVQD_OLDER_PATH="$<TARGET_FILE:kvqd_older>" KVQ_PROJECT_VERSION="${PROJECT_VERSION}")
target_link_libraries(kvq_hardship_test kvq_test_support)
add_dependencies(kvq_hardship_test kvqd kvqctl kvq-hold)
if(KVQ_SANITIZE)  # elsewhere only the shortage tests run
  add_dependencies(kvq_hardship_test kvqd_older)
endif()
gtest_discover_tests(kvq_hardship_test TEST_FILTER "-*NoDescriptors*" DISCOVERY_TIMEOUT 60 PROPERTIES LABELS multiprocess)
if(NOT KVQ_SANITIZE)  # a server that is built outside knows nothing of sanitizers
  add_test(NAME package COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/package_test.py ${CMAKE_BINARY_DIR} ${PROJECT_VERSION})
  set_tests_properties(package PROPERTIES LABELS unit)
endif()
if(NOT KVQ_SANITIZE)  # what tools/packages made, on a machine of its own; as root
  add_test(NAME packages COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/packages_test.py ${CMAKE_SOURCE_DIR}/build/packages $<TARGET_FILE:kvqd_older>)
  set_tests_properties(packages PROPERTIES LABELS packages SKIP_RETURN_CODE 77 TIMEOUT 1500)
endif()
if(NOT KVQ_SANITIZE)  # UBSan's own look at an object takes a descriptor; this one runs with the release build's unit tests
  gtest_discover_tests(kvq_hardship_test TEST_FILTER "*NoDescriptors*" DISCOVERY_TIMEOUT 60 TEST_LIST kvq_shortage_tests PROPERTIES LABELS unit)
endif()
# What an operator's monitoring sees.
add_executable(kvq_metrics_test tests/multiprocess/decoder.cc tests/multiprocess/main.cc tests/multiprocess/metrics_test.cc
  tests/multiprocess/resize_test.cc tests/support/scrape.cc)
target_include_directories(kvq_metrics_test PRIVATE ${JSON_INCLUDE})
target_compile_definitions(kvq_metrics_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>")
target_link_libraries(kvq_metrics_test kvq_test_support)
add_dependencies(kvq_metrics_test kvqd kvqctl kvq-hold)
gtest_discover_tests(kvq_metrics_test DISCOVERY_TIMEOUT 60 PROPERTIES LABELS multiprocess)
# Several GPUs, none of them real.
add_executable(kvq_devices_test tests/multiprocess/devices_test.cc tests/multiprocess/main.cc)
target_include_directories(kvq_devices_test PRIVATE ${JSON_INCLUDE})
target_compile_definitions(kvq_devices_test PRIVATE FAKE_GPU_WORKER_PATH="$<TARGET_FILE:fake_gpu_worker>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>")
target_link_libraries(kvq_devices_test kvq_test_support)
add_dependencies(kvq_devices_test kvqd kvqctl kvq-hold fake_gpu_worker)
gtest_discover_tests(kvq_devices_test DISCOVERY_TIMEOUT 60 PROPERTIES LABELS multiprocess)
# kvqd, a GPU worker without a GPU, and clients.
add_executable(kvq_gpu_worker_test tests/multiprocess/decoder.cc tests/multiprocess/gpu_worker_test.cc tests/multiprocess/main.cc)
target_include_directories(kvq_gpu_worker_test PRIVATE ${JSON_INCLUDE})
target_compile_definitions(kvq_gpu_worker_test PRIVATE KVQD_PATH="$<TARGET_FILE:kvqd>" KVQCTL_PATH="$<TARGET_FILE:kvqctl>"
                           FAKE_GPU_WORKER_PATH="$<TARGET_FILE:fake_gpu_worker>")
target_link_libraries(kvq_gpu_worker_test kvq_test_support)
add_dependencies(kvq_gpu_worker_test kvqd kvqctl kvq-hold fake_gpu_worker)
gtest_discover_tests(kvq_gpu_worker_test DISCOVERY_TIMEOUT 60 PROPERTIES LABELS multiprocess)
# A kvqd of an older version in the same state version: it writes no checksums and has no kill points.
get_target_property(KVQ_STORE_SOURCES kvq_store SOURCES)
add_executable(kvqd_older daemon/main.cc daemon/choose_device.cc daemon/config.cc daemon/core/page_table.cc daemon/gpu_list.cc
  daemon/kill_at.cc daemon/log.cc daemon/make_store.cc daemon/parts.cc daemon/reload.cc daemon/rpc/admin.cc daemon/rpc/session.cc
  daemon/setup.cc daemon/status_line.cc ${KVQ_STORE_SOURCES})
target_compile_definitions(kvqd_older PRIVATE KVQ_VERSION="0.0.9" KVQ_WITHOUT_CHECKSUMS KVQ_WORKER_DIRECTORY="/none")
target_compile_options(kvqd_older PRIVATE -UKVQ_KILL_POINTS -O2 -Wno-maybe-uninitialized)
target_include_directories(kvqd_older PRIVATE ${JSON_INCLUDE} ${TOMLPLUSPLUS_INCLUDE})
target_link_libraries(kvqd_older kvq_keeper kvq_metrics kvq_rpc kvq_core kvq_shm kvq_device_host kvq_device_worker kvq_config kvq_startup CLI11::CLI11
                      spdlog::spdlog OpenSSL::Crypto PkgConfig::SYSTEMD)
add_executable(kvq_bench_client tests/bench/bench_client.cc)
target_link_libraries(kvq_bench_client kvq_test_support benchmark::benchmark)
add_executable(kvq_bench_recovery tests/bench/bench_recovery.cc tests/bench/recovery_store.cc)
target_link_libraries(kvq_bench_recovery kvq_test_support kvq_store benchmark::benchmark)
# The GPU worker without a GPU.
add_executable(fake_gpu_worker tests/support/fake_gpu_worker.cc tests/support/memory_backend.cc)
target_link_libraries(fake_gpu_worker kvq_gpu_worker kvq_shm kvq_kernels)
# Rooms of the daemon's heart: each test file is a program of its name.
function(kvq_room_test path labels)
  get_filename_component(name ${path} NAME_WE)
  add_executable(${name} ${path})
  target_link_libraries(${name} kvq_store kvq_device_host GTest::gtest_main)
  gtest_discover_tests(${name} PROPERTIES LABELS "${labels}")
endfunction()
kvq_room_test(tests/core/limbo_test.cc unit)
kvq_room_test(tests/core/page_table_test.cc unit)
kvq_room_test(tests/core/planner_test.cc unit)
kvq_room_test(tests/core/prefix_index_test.cc unit)
kvq_room_test(tests/core/sequence_table_test.cc unit)
kvq_room_test(tests/core/slab_pool_test.cc unit)
foreach(test conformance worker_device worker_resize)
  add_executable(${test}_test tests/device/${test}_test.cc)
  target_link_libraries(${test}_test kvq_store kvq_device_host kvq_device_worker GTest::gmock_main)
  target_compile_definitions(${test}_test PRIVATE FAKE_GPU_WORKER_PATH="$<TARGET_FILE:fake_gpu_worker>")
  add_dependencies(${test}_test fake_gpu_worker)
  gtest_discover_tests(${test}_test PROPERTIES LABELS multiprocess)
endforeach()
add_executable(batch_pace_test tests/gpu/batch_pace_test.cc)  # the part of the worker's jobs that knows no CUDA
target_link_libraries(batch_pace_test kvq_gpu_worker GTest::gtest_main)
gtest_discover_tests(batch_pace_test PROPERTIES LABELS unit)
kvq_room_test(tests/shm/directory_test.cc multiprocess)
kvq_room_test(tests/shm/session_segment_test.cc unit)
kvq_room_test(tests/store_adopt_test.cc unit)
kvq_room_test(tests/store_asked_test.cc unit)
kvq_room_test(tests/store_hostile_test.cc unit)
kvq_room_test(tests/store_integrity_test.cc unit)
kvq_room_test(tests/store_lists_test.cc unit)
target_link_libraries(store_lists_test GTest::gmock)
kvq_room_test(tests/store_model_test.cc model)
kvq_room_test(tests/store_pressure_test.cc unit)
kvq_room_test(tests/store_resize_test.cc unit)
kvq_room_test(tests/store_test.cc unit)
# The model of the step protocol. Not sanitized: its fibers switch stacks under the sanitizers' feet, and it checks races itself.
add_executable(epochs_test
  tests/epochs/adoption_test.cc
  tests/epochs/buckets_test.cc
  tests/epochs/commands_test.cc
  tests/epochs/credits_test.cc
  tests/epochs/devices_test.cc
  tests/epochs/explore.cc
  tests/epochs/fiber.cc
  tests/epochs/ids_test.cc
  tests/epochs/memory.cc
  tests/epochs/memory_test.cc
  tests/epochs/mirrors_test.cc
  tests/epochs/moves_test.cc
  tests/epochs/rings_test.cc
  tests/epochs/seals_test.cc
  tests/epochs/sessions_test.cc)
target_include_directories(epochs_test PRIVATE ${CMAKE_SOURCE_DIR})
target_compile_options(epochs_test PRIVATE -O2 -fno-sanitize=all)
target_link_options(epochs_test PRIVATE -fno-sanitize=all)
target_link_libraries(epochs_test kvq_contract GTest::gmock_main)
gtest_discover_tests(epochs_test PROPERTIES LABELS model)
add_executable(kvq_bench_store tests/bench/bench_store.cc)
target_link_libraries(kvq_bench_store kvq_store kvq_device_host GTest::gtest benchmark::benchmark_main)
# Coverage-guided fuzzing (preset fuzz): CI runs each target for a few seconds over its corpus, tools/fuzz for as long as one likes.
if(KVQ_FUZZ)
  set(KVQ_FUZZ_SECONDS 10 CACHE STRING "how long ctest runs each fuzz target")
  add_custom_target(fuzz_targets)
  foreach(target fuzz_adopt fuzz_commands fuzz_notify fuzz_rpc)
    add_executable(${target} tests/fuzz/${target}.cc)
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR})
    target_link_options(${target} PRIVATE -fsanitize=fuzzer)
    add_dependencies(fuzz_targets ${target})
    add_test(NAME ${target} COMMAND ${CMAKE_SOURCE_DIR}/tools/fuzz --run ${CMAKE_BINARY_DIR} ${target} ${KVQ_FUZZ_SECONDS})
    set_tests_properties(${target} PROPERTIES LABELS fuzz)
  endforeach()
  foreach(target fuzz_adopt fuzz_commands fuzz_rpc)
    target_link_libraries(${target} kvq_store kvq_device_host GTest::gtest)
  endforeach()
  target_link_libraries(fuzz_rpc kvq_rpc)
  target_link_options(fuzz_rpc PRIVATE -Wl,--wrap=syscall)
  target_sources(fuzz_notify PRIVATE tools/kvq-hold/descriptor_store.cc tools/kvq-hold/notify_socket.cc)
  target_link_libraries(fuzz_notify kvq_keeper)
endif()
# What tools/test builds in release: what is installed, every instruction set of the kernels, what sanitizers are in the way of, CUDA.
add_custom_target(release_tests DEPENDS kvqd kvqctl kvq-hold kvq kvq_kernels_test kvq_client_test kvq_exports_test
                  kvq_hardship_test conformance_test store_adopt_test store_test)
if(KVQ_CUDA)
  include(tests/gpu/gpu_tests.cmake)
  add_dependencies(release_tests gpu_programs kvqd_gpu_test cuda_jobs_test)
  if(NOT KVQ_SANITIZE)
    include(tests/support/simt/simt.cmake)
    add_dependencies(release_tests simt_attend_test)
  endif()
endif()
