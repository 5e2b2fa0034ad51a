# Flags for our own code: warnings, hardening, sanitizer, linker and compiler cache.
option(DISTRAIN_WERROR "Warnings are errors" ON)  # OFF for compilers that we do not test
add_library(distrain_flags INTERFACE)
target_compile_options(
  distrain_flags
  INTERFACE -Wall -Wextra $<$<BOOL:${DISTRAIN_WERROR}>:-Werror> -Wno-psabi -Wnon-virtual-dtor
            -Woverloaded-virtual -Wno-missing-field-initializers)

# In every preset, because LibTorch is built with NDEBUG and the layout of at::RecordFunction depends on it.
add_compile_definitions(NDEBUG)

# With the precompiled header in memory GCC would garbage-collect half a gigabyte again and again. A larger
# minimum heap saves a tenth of the compile time and costs a tenth more memory.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1500000>)
endif()

# Libraries and programs use one code model, because they share a precompiled header.
add_compile_options(-fPIC -fno-semantic-interposition)
add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:-pie>)

if(DISTRAIN_SANITIZER)
  add_compile_definitions(DISTRAIN_SANITIZED)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Below -O2 or with a sanitizer this warning has false positives in LibTorch's inline functions.
  add_compile_options(-Wno-maybe-uninitialized)
endif()
if(DISTRAIN_SANITIZER STREQUAL "asan")
  # vptr needs type information that LibTorch hides. The checks in `strict` instrument each pointer in
  # LibTorch's inline functions: they cost a third of the compile time and find errors that crash or that
  # asan finds anyway. Layers without torch, which parse bytes, use them (distrain_strict_flags).
  set(strict null,alignment,object-size)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=vptr,${strict})
  add_link_options(-fsanitize=address,undefined)
elseif(DISTRAIN_SANITIZER STREQUAL "tsan")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC warns that tsan does not support atomic_thread_fence, which LibTorch's headers use.
    add_compile_options(-Wno-tsan)
  endif()
elseif(DISTRAIN_SANITIZER STREQUAL "")
  add_compile_options(-fstack-protector-strong)
  add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
  add_compile_definitions($<$<NOT:$<CONFIG:Debug>>:_FORTIFY_SOURCE=2> _GLIBCXX_ASSERTIONS)
else()
  message(FATAL_ERROR "DISTRAIN_SANITIZER is '${DISTRAIN_SANITIZER}': use asan, tsan or nothing")
endif()

# Flags for the layers that copy and parse bytes: in the release preset they use -O2 and not the shared precompiled
# header, whose level is -O1. A small call spends a fifth of its time in these layers. The other layers use -O1, which
# takes three quarters of the compile time: paired benchmarks of allreduce and the jobs show no difference, because
# LibTorch does the arithmetic.
add_library(distrain_strict_flags INTERFACE)
target_link_libraries(distrain_strict_flags INTERFACE distrain_flags)
if(NOT DISTRAIN_SANITIZER)
  target_compile_options(distrain_strict_flags INTERFACE $<$<CONFIG:RelWithDebInfo>:-O2>)
endif()
if(DISTRAIN_SANITIZER STREQUAL "asan")
  target_compile_options(distrain_strict_flags INTERFACE -O1 -fsanitize=${strict})
endif()

find_program(DISTRAIN_LINKER NAMES mold ld.lld)
if(DISTRAIN_LINKER)
  cmake_path(GET DISTRAIN_LINKER FILENAME linker)
  string(REGEX REPLACE "^ld\\." "" linker ${linker})
  add_link_options(-fuse-ld=${linker})
endif()

# ccache supports a precompiled header only with this sloppiness and with -fpch-preprocess.
find_program(DISTRAIN_CCACHE ccache)
if(DISTRAIN_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER
      env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      ${DISTRAIN_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
  endif()
endif()
