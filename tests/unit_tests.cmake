# Tests that start no program: tests of layers, of jobs whose ranks are threads of one process, on the fake network and
# on the fake device, and fuzz targets.

# This file replaces operator new for its whole program. GCC must not inline it into other files.
set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/unit/wire/counting_new.cpp
                            PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

foreach(layer IN LISTS layers)
  file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/unit/${layer}/*.cpp)
  list(REMOVE_ITEM files ${symbols_test})
  if(layer IN_LIST DISTRAIN_TORCH_FREE_LAYERS)
    distrain_catch_tests(unit_${layer} LABELS unit ${layer} FILES ${files} LINK distrain::${layer})
  elseif(layer STREQUAL "nn")  # its tests also train modules and tables
    distrain_catch_tests(unit_${layer} TORCH LABELS unit ${layer} FILES ${files}
                         LINK distrain::${layer} distrain::table)
  elseif(layer MATCHES "^(app|scenario)$")  # tests of app run command lines of the jobs
    distrain_catch_tests(unit_${layer} TORCH LABELS unit ${layer} FILES ${files} LINK distrain::cmd)
  else()
    distrain_catch_tests(unit_${layer} TORCH LABELS unit ${layer} FILES ${files}
                         LINK distrain::${layer})
  endif()
endforeach()
target_include_directories(unit_rpc PRIVATE ${PROJECT_SOURCE_DIR}/src/rpc ${PROJECT_SOURCE_DIR}/src/membership)
target_include_directories(unit_net PRIVATE ${PROJECT_SOURCE_DIR}/src/net)
target_include_directories(unit_membership PRIVATE ${PROJECT_SOURCE_DIR}/src/membership)
target_include_directories(unit_optim PRIVATE ${PROJECT_SOURCE_DIR}/src/optim ${PROJECT_SOURCE_DIR}/src/rpc
                                              ${PROJECT_SOURCE_DIR}/src/membership)

file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/integration/*.cpp)
distrain_catch_tests(integration TORCH LABELS integration FILES ${files} LINK distrain::cmd)
if(DISTRAIN_SANITIZER STREQUAL "asan")
  foreach(program IN ITEMS integration unit_scenario)
    target_sources(${program} PRIVATE support/tensor_memory.cpp)
  endforeach()
endif()

if(DISTRAIN_SANITIZER STREQUAL "tsan")
  return()  # the other tests have one thread
endif()

# Runs the control plane of many ranks on a fake network in virtual time.
file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/fake_network/*.cpp)
distrain_catch_tests(fake_network LABELS fake_network FILES ${files} LINK distrain::membership)
target_include_directories(fake_network PRIVATE ${PROJECT_SOURCE_DIR}/src/membership)

# Fuzz targets (fuzz/README.md): one program for the targets with torch and one for the others. They make their
# own random mutations, or use libFuzzer in the `fuzz` preset. Each target is a test.
option(DISTRAIN_LIBFUZZER "Build tests/fuzz with libFuzzer (clang)" OFF)
add_custom_target(fuzz_programs)
add_dependencies(ci_programs fuzz_programs)

# distrain_fuzz_program(<program> <folder> <flags> LINK <target>... TARGETS <name>...)
function(distrain_fuzz_program program folder)
  cmake_parse_arguments(arg "" "" "LINK;TARGETS" ${ARGN})
  set(here ${CMAKE_CURRENT_SOURCE_DIR})
  file(GLOB files CONFIGURE_DEPENDS ${here}/fuzz/${folder}/*.cpp)
  add_executable(${program} EXCLUDE_FROM_ALL ${files} support/fuzz_target.cpp support/heap_use.cpp)
  target_include_directories(${program} PRIVATE ${here})
  target_link_libraries(${program} PRIVATE ${arg_LINK})
  add_dependencies(fuzz_programs ${program})
  if(DISTRAIN_LIBFUZZER)
    target_link_options(${program} PRIVATE -fsanitize=fuzzer)
  else()
    target_sources(${program} PRIVATE support/fuzz_main.cpp)
  endif()
  # This file replaces malloc for its whole program.
  set_source_files_properties(support/heap_use.cpp PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON
                                                              SKIP_PRECOMPILE_HEADERS ON)
  foreach(target IN LISTS arg_TARGETS)
    if(DISTRAIN_LIBFUZZER)
      add_test(NAME fuzz.${target} COMMAND bash ${here}/fuzz/guided.sh $<TARGET_FILE:${program}> ${target})
    else()
      add_test(NAME fuzz.${target} COMMAND ${program} --target=${target} ${here}/fuzz/corpus/${target})
    endif()
    set_tests_properties(fuzz.${target} PROPERTIES LABELS "fuzz;ci;${folder}" TIMEOUT 240)
  endforeach()
endfunction()

distrain_fuzz_program(fuzz_wire wire LINK distrain::net distrain_strict_flags
                      TARGETS header tensor_desc hello join directory rank_devices all_devices error
                              stream)
distrain_fuzz_program(fuzz_torch torch LINK distrain::job ZLIB::ZLIB distrain_flags
                      TARGETS message trace collective manifest gzip idx safetensors)
distrain_use_torch_pch(fuzz_torch)

# The fake device registers itself, so its object files must be linked directly.
file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/support/fake_device*.cpp)
add_library(distrain_fake_device OBJECT ${files})
target_include_directories(distrain_fake_device PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(distrain_fake_device PUBLIC distrain_torch PRIVATE distrain_flags Threads::Threads)
distrain_use_torch_pch(distrain_fake_device)
file(GLOB files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/fake_device/*.cpp)
list(REMOVE_ITEM files ${device_suites})
distrain_catch_tests(fake_device TORCH LABELS fake_device FILES ${files} SUITES ${device_suites}
                     LINK distrain::cmd distrain_fake_device)
target_include_directories(fake_device PRIVATE ${PROJECT_SOURCE_DIR}/src/rpc)
if(DISTRAIN_SANITIZER STREQUAL "asan")
  target_sources(fake_device PRIVATE support/tensor_memory.cpp)
endif()
add_test(NAME fake_device.mutants
         COMMAND bash ${CMAKE_CURRENT_SOURCE_DIR}/fake_device/mutants.sh $<TARGET_FILE:fake_device>
                 ${PROJECT_SOURCE_DIR})
distrain_test_properties(fake_device.mutants ${CMAKE_CURRENT_SOURCE_DIR}/fake_device/mutants.sh 3600
                         fake_device soak mutants)

# Checks that each test case that conformance/*.tsv names exists. `.ci/run` checks that it has passed.
if(DISTRAIN_SANITIZER STREQUAL "asan")
  add_test(NAME conformance COMMAND python3 ${CMAKE_CURRENT_SOURCE_DIR}/conformance/check.py
                                    ${PROJECT_BINARY_DIR})
  set_tests_properties(conformance PROPERTIES LABELS conformance TIMEOUT 240)
endif()
