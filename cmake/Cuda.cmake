# libdistrain_cuda.so: all that CUDA needs beyond c10's interfaces, loaded when a device is asked for.
# It has no kernels, so the C++ compiler does, with the headers of the Toolkit and of NCCL alone.
# Nothing of NVIDIA's is linked: which libraries these functions come from is settled at run time,
# by the LibTorch at hand, or two versions of one library could end up in a process.
set(DISTRAIN_CUDA AUTO CACHE STRING "Build libdistrain_cuda.so: AUTO (where the Toolkit is), ON, OFF")
set_property(CACHE DISTRAIN_CUDA PROPERTY STRINGS AUTO ON OFF)

# Sets DISTRAIN_CUDA_RUNTIME_INCLUDE and DISTRAIN_NCCL_INCLUDE, or `result` to what is lacking.
function(distrain_find_cuda result)
  file(GLOB torch_includes ${torch_root}/../nvidia/*/include)
  set(hints $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include /usr/local/cuda/include)
  find_path(DISTRAIN_CUDA_RUNTIME_INCLUDE cuda_runtime_api.h HINTS ${hints} PATHS ${torch_includes})
  find_path(DISTRAIN_NCCL_INCLUDE nccl.h HINTS ${torch_includes} ${hints})
  set(${result} "" PARENT_SCOPE)
  if(NOT DISTRAIN_CUDA_RUNTIME_INCLUDE)
    set(${result} "no CUDA Toolkit (cuda_runtime_api.h)" PARENT_SCOPE)
    return()
  elseif(NOT DISTRAIN_NCCL_INCLUDE)
    set(${result} "no NCCL (nccl.h)" PARENT_SCOPE)
    return()
  endif()
  file(STRINGS ${DISTRAIN_CUDA_RUNTIME_INCLUDE}/cuda_runtime_api.h line
       REGEX "^#define CUDART_VERSION +[0-9]+")
  string(REGEX MATCH "[0-9]+$" version "${line}")
  math(EXPR major "${version} / 1000")
  file(GLOB torch_cudart ${torch_root}/../nvidia/cu*/lib/libcudart.so.*
       ${torch_root}/lib/libcudart*.so.*)
  string(REGEX MATCH "libcudart[^/]*\\.so\\.([0-9]+)" found "${torch_cudart}")
  if(found AND NOT CMAKE_MATCH_1 EQUAL major)
    set(${result} "the Toolkit is CUDA ${major}'s, LibTorch wants CUDA ${CMAKE_MATCH_1}"
        PARENT_SCOPE)
  endif()
endfunction()

function(distrain_cuda_plugin)
  if(DISTRAIN_SANITIZER AND DISTRAIN_CUDA AND NOT DISTRAIN_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "DISTRAIN_CUDA=${DISTRAIN_CUDA}, but a build with a sanitizer has none: "
                        "set AUTO or OFF.")
  elseif(DISTRAIN_SANITIZER OR NOT DISTRAIN_CUDA)
    return()
  endif()
  distrain_find_cuda(lacking)
  if(lacking AND DISTRAIN_CUDA STREQUAL "AUTO")
    message(STATUS "libdistrain_cuda.so is not built: ${lacking}")
    return()
  elseif(lacking)
    message(FATAL_ERROR "DISTRAIN_CUDA=${DISTRAIN_CUDA}, but ${lacking}: set CUDA_HOME, or OFF.")
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/plugin/*.cpp)
  set(exports ${PROJECT_SOURCE_DIR}/src/cuda/plugin/exports.map)
  add_library(distrain_cuda_plugin MODULE ${sources})
  set_target_properties(
    distrain_cuda_plugin PROPERTIES OUTPUT_NAME distrain_cuda LINK_DEPENDS ${exports}
                                    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
  target_include_directories(distrain_cuda_plugin PRIVATE ${PROJECT_SOURCE_DIR}/include)
  target_include_directories(
    distrain_cuda_plugin SYSTEM PRIVATE ${DISTRAIN_CUDA_RUNTIME_INCLUDE} ${DISTRAIN_NCCL_INCLUDE})
  target_link_libraries(distrain_cuda_plugin PRIVATE distrain::base distrain_torch distrain_flags)
  target_link_options(distrain_cuda_plugin PRIVATE -Wl,--version-script=${exports})
endfunction()
