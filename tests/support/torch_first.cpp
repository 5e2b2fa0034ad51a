// Runs distrain in a program whose main() has used torch, so OpenMP's threads exist already.
#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "../../cmd/jobs.h"
#include "distrain/app/main.h"

int main(int argc, char** argv) {
  at::set_num_threads(2);  // even on one core
  at::set_num_interop_threads(2);
  if (at::ones({1 << 20}).exp().sum().item<double>() < 1 << 20) return 1;
  return distrain::app::main(argc, argv, distrain::cmd::jobs());
}
