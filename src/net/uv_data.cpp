// Defines hidden variables that replace variables of the C library in our copy of libuv: see
// cmake/Uv.cmake. They are needed if the installed libuv is not compiled with -fPIC, because such
// code in a shared library can refer to hidden variables only. With -fPIC, they are unused.
#include <cstdio>

#include <netinet/in.h>

extern "C" {

/// Only libuv sees this `environ`, so uv_spawn with an environment, uv_os_environ and uv_os_setenv
/// do not work. We call none of them.
[[gnu::visibility("hidden")]] char** distrain_uv_environ = nullptr;

/// Replaces the C library's `stderr`, which libuv uses in uv_print_all_handles().
[[gnu::visibility("hidden")]] FILE* distrain_uv_stderr = stderr;

[[gnu::visibility("hidden")]] extern const in6_addr distrain_uv_in6addr_any;
const in6_addr distrain_uv_in6addr_any = IN6ADDR_ANY_INIT;

}  // extern "C"
