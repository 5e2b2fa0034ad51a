// Compiled into each program. OpenMP's idle threads spin 300,000 times, for milliseconds, before
// they sleep. If other processes use the CPUs, too, the busy threads wait for the spinning ones:
// `--local` with two threads took ten times as long as with one. So this file sets GOMP_SPINCOUNT
// to 3,000 spins. They take as long as waking a thread does, so they cost nothing on idle CPUs.
//
// libgomp reads its variables when it is loaded. The environment has no room for another variable
// then, so this file overwrites a variable that no library reads, and restores it before main().
namespace {

char spins[] = "GOMP_SPINCOUNT=3000";
char** slot = nullptr;
char* kept = nullptr;

// Returns true if `variable` begins with `name` and '='. May run before the sanitizer is set up.
__attribute__((no_sanitize("address"))) bool sets(const char* variable, const char* name) {
  while (*name && *variable == *name) ++variable, ++name;
  return !*name && *variable == '=';
}

__attribute__((no_sanitize("address"))) void before_libraries(int, char**, char** environment) {
  char** spare = nullptr;
  for (char** each = environment; *each; ++each) {
    if (sets(*each, "OMP_WAIT_POLICY") || sets(*each, "GOMP_SPINCOUNT")) return;
    if (sets(*each, "_") || sets(*each, "PWD") || sets(*each, "HOSTNAME")) spare = each;
  }
  if (!spare) return;
  slot = spare;
  kept = *spare;
  *spare = spins;
}

[[gnu::section(".preinit_array"), gnu::used]] void (*hook)(int, char**, char**) = before_libraries;

// Restores the overwritten variable. By now the constructors of all libraries have run.
[[gnu::constructor]] void after_libraries() {
  if (slot) *slot = kept;
}

}  // namespace
