// What our copy of libuv has in place of variables of the C library: see cmake/Uv.cmake. Hidden, so
// that libuv's code reaches them at a fixed distance, in a program as in a shared library. Without
// users where libuv is compiled for shared libraries.
#include <cstdio>

#include <netinet/in.h>

extern "C" {

/// A variable of its own, which nobody else sees: uv_spawn with an environment, uv_os_environ and
/// uv_os_setenv's kin do not work with it. We call none of them.
[[gnu::visibility("hidden")]] char** distrain_uv_environ = nullptr;

/// For uv_print_all_handles.
[[gnu::visibility("hidden")]] FILE* distrain_uv_stderr = stderr;

[[gnu::visibility("hidden")]] extern const in6_addr distrain_uv_in6addr_any;
const in6_addr distrain_uv_in6addr_any = IN6ADDR_ANY_INIT;

}  // extern "C"
