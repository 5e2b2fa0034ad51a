// distrain as a program whose main() has used torch before app::main: OpenMP's threads are there.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "distrain/app/main.h"
#include "jobs.h"

int main(int argc, char** argv) {
  at::set_num_threads(2);  // on one core, too
  at::set_num_interop_threads(2);
  if (at::ones({1 << 20}).exp().sum().item<double>() < 1 << 20) return 1;
  return distrain::app::main(argc, argv, distrain::cmd::jobs());
}
