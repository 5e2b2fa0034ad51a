# libuv is linked statically and hidden, because libtorch_cpu.so exports a libuv of its own. Linking the whole
# archive makes our code use our libuv in any link order, and --exclude-libs keeps torch from binding to it.
# --exclude-libs names only our libuv: hiding the inline functions and variables that we share with torch would
# duplicate them.
find_path(DISTRAIN_UV_INCLUDE uv.h REQUIRED)
find_library(DISTRAIN_UV_LIBRARY NAMES libuv_a.a libuv.a REQUIRED)
cmake_path(GET DISTRAIN_UV_LIBRARY FILENAME uv_file)
set(uv_archive ${DISTRAIN_UV_LIBRARY})
set(uv_data ${PROJECT_SOURCE_DIR}/src/net/uv_data.cpp)

# Sets `result` to whether the whole `archive` links into a shared library, together with uv_data.cpp.
function(distrain_try_shared result archive)
  get_property(link_options DIRECTORY PROPERTY LINK_OPTIONS)
  list(FILTER link_options INCLUDE REGEX "^-fuse-ld=")
  try_compile(
    ${result} SOURCES ${uv_data} COMPILE_DEFINITIONS -fPIC LINK_OPTIONS -shared ${link_options}
    LINK_LIBRARIES -Wl,--whole-archive ${archive} -Wl,--no-whole-archive
    OUTPUT_VARIABLE output)
  string(REGEX MATCH "[^\n]*relocation[^\n]*" line "${output}")
  set(${result}_error "${line}" PARENT_SCOPE)
endfunction()

# Debian's libuv_a.a is compiled for programs: its relocations of the C library's variables do not work in a
# shared library. A copy of the archive refers to variables of src/net instead.
distrain_try_shared(DISTRAIN_UV_IS_PIC ${uv_archive})
if(NOT DISTRAIN_UV_IS_PIC)
  set(uv_archive ${PROJECT_BINARY_DIR}/uv/${uv_file})
  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/uv)
  execute_process(
    COMMAND ${CMAKE_OBJCOPY} --redefine-sym environ=distrain_uv_environ
            --redefine-sym stderr=distrain_uv_stderr
            --redefine-sym in6addr_any=distrain_uv_in6addr_any ${DISTRAIN_UV_LIBRARY} ${uv_archive}.new
            COMMAND_ERROR_IS_FATAL ANY)
  # A new time of the archive would link all programs again after each configuration.
  file(COPY_FILE ${uv_archive}.new ${uv_archive} ONLY_IF_DIFFERENT)
  distrain_try_shared(DISTRAIN_UV_COPY_IS_PIC ${uv_archive})
  if(NOT DISTRAIN_UV_COPY_IS_PIC)
    message(FATAL_ERROR "${DISTRAIN_UV_LIBRARY} cannot go into a shared library: "
                        "${DISTRAIN_UV_COPY_IS_PIC_error}")
  endif()
endif()

add_library(distrain_uv_archive STATIC IMPORTED)
set_target_properties(distrain_uv_archive PROPERTIES IMPORTED_LOCATION ${uv_archive})
add_library(distrain_uv INTERFACE)
target_include_directories(distrain_uv SYSTEM INTERFACE ${DISTRAIN_UV_INCLUDE})
target_link_libraries(
  distrain_uv INTERFACE $<LINK_LIBRARY:WHOLE_ARCHIVE,distrain_uv_archive> Threads::Threads dl rt)
target_link_options(distrain_uv INTERFACE -Wl,--exclude-libs,${uv_file})
if(NOT DISTRAIN_UV_IS_PIC)
  # The linker searches the archive of `net` before libuv's, so it must know of this symbol from the start.
  target_link_options(distrain_uv INTERFACE -Wl,-u,distrain_uv_environ)
endif()
