// The peer of bench_echo --add and bench_allreduce: the same work by MPI. Prints the same lines.
// Build: mpicxx -O3 mpi.cpp -o mpi. Run: mpirun -n 2 ./mpi [echo|allreduce [BYTES...]]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <mpi.h>
#include <sys/resource.h>

namespace {

int rank = 0;
int world = 0;

double cpu_us() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1e6 + used.ru_utime.tv_usec +
         used.ru_stime.tv_usec;
}

// Calls `f` and prints its quantiles; `cpu_us` is of all ranks if `of_all`, else of rank 0.
template <class F>
void measure(const char* op, long bytes, int rounds, bool of_all, F f) {
  for (int i = 0; i < std::max(rounds / 10, 2); ++i) f();
  MPI_Barrier(MPI_COMM_WORLD);
  std::vector<double> us;
  const double before = cpu_us();
  for (int i = 0; i < rounds; ++i) {
    const double start = MPI_Wtime();
    f();
    us.push_back((MPI_Wtime() - start) * 1e6);
  }
  double used = (cpu_us() - before) / rounds, sum = 0;
  MPI_Reduce(&used, &sum, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  if (rank != 0) return;
  std::sort(us.begin(), us.end());
  const auto at = [&us](double q) { return us[static_cast<size_t>(q * (us.size() - 1))]; };
  std::printf(
      "{\"event\":\"bench\",\"name\":\"%s\",\"impl\":\"mpi\",\"world_size\":%d,\"bytes\":%ld,"
      "\"calls\":%d,"
      "\"p50_us\":%.2f,\"p90_us\":%.2f,\"p99_us\":%.2f,\"cpu_us\":%.0f,\"verified\":true}\n",
      op, world, bytes, rounds, at(0.5), at(0.9), at(0.99), of_all ? sum : used);
}

void fail(const char* what) {
  std::fprintf(stderr, "mpi: %s is wrong\n", what);
  MPI_Abort(MPI_COMM_WORLD, 1);
}

void echo(long bytes) {
  const long n = bytes / 4;
  std::vector<float> values(n);
  const int size = static_cast<int>(bytes);
  const auto add = [&values] {
    for (float& value : values) value += 1;
  };
  measure("echo", bytes, std::max<int>(11, std::min<long>(4000, (1L << 30) / bytes)), true, [&] {
    if (rank == 1) {
      MPI_Recv(values.data(), size, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      add();
      MPI_Send(values.data(), size, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
      return;
    }
    const float expected = values[0] + 2;
    MPI_Send(values.data(), size, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
    MPI_Recv(values.data(), size, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    add();
    bool right = true;
    for (const float value : values) right &= value == expected;
    if (!right) fail("a sum");
  });
}

void allreduce(long bytes) {
  std::vector<float> values(bytes / 4, 1.0F + rank);
  const int count = static_cast<int>(values.size());
  const auto reduce = [&] {
    MPI_Allreduce(MPI_IN_PLACE, values.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  reduce();
  for (const float value : values) {
    if (value != world * (world + 1) / 2.0F) fail("a sum");
  }
  std::fill(values.begin(), values.end(), 0.0F);
  measure("allreduce", bytes, bytes > (1 << 22) ? 40 : 2000, false, reduce);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  const std::string op = argc > 1 ? argv[1] : "echo";
  for (int i = 2; i < argc; ++i) {
    const long bytes = std::atol(argv[i]);
    op == "echo" ? echo(bytes) : allreduce(bytes);
  }
  MPI_Finalize();
}
