# Third-party libraries. They come from Debian packages, but LibTorch from ./run or LIBTORCH=<dir>.
find_package(Threads REQUIRED)
find_package(CLI11 REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(ZLIB REQUIRED)
find_package(OpenSSL 3.0 REQUIRED COMPONENTS Crypto)
if(DISTRAIN_TESTS)
  find_package(Catch2 REQUIRED)
endif()

# Debian's fmt, for units without torch; libfmt.so would be one more library to install. Units with torch
# find the newer fmt that LibTorch carries, and link distrain_torch_fmt.
find_path(DISTRAIN_FMT_INCLUDE fmt/format.h REQUIRED)
add_library(distrain_fmt STATIC ${PROJECT_SOURCE_DIR}/cmake/fmt.cpp)

# xxHash is linked statically, because only one of its functions is used. Where only a shared library is packaged
# (Fedora), src/store/hash.cpp compiles xxHash from its header.
find_path(DISTRAIN_XXHASH_INCLUDE xxhash.h REQUIRED)
find_library(DISTRAIN_XXHASH_LIBRARY NAMES libxxhash.a)
add_library(distrain_xxhash INTERFACE)
target_include_directories(distrain_xxhash SYSTEM INTERFACE ${DISTRAIN_XXHASH_INCLUDE})
if(DISTRAIN_XXHASH_LIBRARY)
  target_link_libraries(distrain_xxhash INTERFACE ${DISTRAIN_XXHASH_LIBRARY})
else()
  target_compile_definitions(distrain_xxhash INTERFACE XXH_IMPLEMENTATION)
endif()

include(Uv)

# The libraries that parse the command line and print JSON.
add_library(distrain_cli INTERFACE)
target_link_libraries(distrain_cli INTERFACE CLI11::CLI11 nlohmann_json::nlohmann_json)

include(LibTorch)
set(LIBTORCH "$ENV{LIBTORCH}" CACHE PATH "A LibTorch folder (include/, lib/) to use instead of .deps")
set(torch_root ${PROJECT_SOURCE_DIR}/.deps/site/torch)
if(NOT LIBTORCH)  # a configuration before may have cached an empty value
  set(LIBTORCH "$ENV{LIBTORCH}")
endif()
if(LIBTORCH)
  set(torch_root ${LIBTORCH})
endif()
distrain_check_torch(lacking)
if(lacking)
  message(FATAL_ERROR "${lacking}. './run build' fetches a LibTorch, or set LIBTORCH=<dir>.")
endif()
distrain_import_torch()

# Definitions that make LibTorch's headers declare its own RPC classes, for oracle tests and benchmarks.
add_library(distrain_torch_rpc INTERFACE)
target_compile_definitions(distrain_torch_rpc INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_RPC
                                                        USE_TENSORPIPE)
target_link_libraries(distrain_torch_rpc INTERFACE distrain_torch)
