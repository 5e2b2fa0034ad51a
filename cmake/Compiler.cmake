# Flags of our own code: warnings, hardening, sanitizer, linker and compiler cache.
option(DISTRAIN_WERROR "Warnings are errors" ON)  # OFF for a compiler that we do not know
add_library(distrain_flags INTERFACE)
target_compile_options(
  distrain_flags
  INTERFACE -Wall -Wextra $<$<BOOL:${DISTRAIN_WERROR}>:-Werror> -Wno-psabi -Wnon-virtual-dtor
            -Woverloaded-virtual -Wno-missing-field-initializers)

# Always: LibTorch is built with it, and the layout of at::RecordFunction depends on it.
add_compile_definitions(NDEBUG)

# With the precompiled header in memory GCC would look through half a gigabyte for garbage, again and
# again: a tenth of the compile time, for a tenth of the memory.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1500000>)
endif()

# One code model for libraries and programs alike, because they share a precompiled header.
add_compile_options(-fPIC -fno-semantic-interposition)
add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:-pie>)

if(DISTRAIN_SANITIZER)
  add_compile_definitions(DISTRAIN_SANITIZED)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's flow warnings are wrong about LibTorch's inline functions below -O2 and with a sanitizer.
  add_compile_options(-Wno-maybe-uninitialized)
endif()
if(DISTRAIN_SANITIZER STREQUAL "asan")
  # vptr wants type information that LibTorch hides. The others are of each pointer that its inline
  # functions use: a third of the compile time, for what crashes or is asan's anyway. Layers without
  # torch, which take bytes apart, have them (distrain_strict_flags).
  set(strict null,alignment,object-size)
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=vptr,${strict})
  add_link_options(-fsanitize=address,undefined)
elseif(DISTRAIN_SANITIZER STREQUAL "tsan")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # It warns about atomic_thread_fence in headers that are not ours; tsan itself copes.
    add_compile_options(-Wno-tsan)
  endif()
elseif(DISTRAIN_SANITIZER STREQUAL "")
  add_compile_options(-fstack-protector-strong)
  add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
  add_compile_definitions($<$<NOT:$<CONFIG:Debug>>:_FORTIFY_SOURCE=2> _GLIBCXX_ASSERTIONS)
else()
  message(FATAL_ERROR "DISTRAIN_SANITIZER is '${DISTRAIN_SANITIZER}': use asan, tsan or nothing")
endif()

# Flags of the layers without torch, which do not share the precompiled header: they copy and parse bytes, so
# -O2 pays there. The release preset compiles the layers with torch by -O1, in three quarters of the time:
# paired benchmarks of small calls, allreduce and the jobs show no difference, because LibTorch does the
# arithmetic.
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

# ccache sees through a precompiled header only with these allowances and -fpch-preprocess.
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
