// Tests the sources of rank, size and address: flags, torchrun, Open MPI, PMI, a step of Slurm.
#include <array>
#include <cstdlib>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "../cmd/jobs.h"
#include "support/catch.h"
#include "support/refusal.h"

using namespace distrain;
using namespace distrain::testing;

namespace {

std::vector<std::string> split(const std::string& words) {
  std::istringstream stream(words);
  return {std::istream_iterator<std::string>(stream), {}};
}

/// Sets the environment variables in a text "NAME=value ..." and unsets others that place ranks.
class Variables {
 public:
  explicit Variables(const std::string& settings) {
    for (const std::string& name :
         split("RANK WORLD_SIZE MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE "
               "PMI_RANK PMI_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE "
               "SLURM_PROCID SLURM_NTASKS SLURM_STEP_ID LOCAL_RANK "
               "TORCHELASTIC_USE_AGENT_STORE OMPI_COMM_WORLD_LOCAL_RANK "
               "MPI_LOCALRANKID SLURM_LOCALID TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT "
               "PMIX_NAMESPACE SLURM_JOB_ID SLURM_HET_JOB_ID SLURM_RESTART_COUNT "
               "SLURM_STEP_NUM_NODES MPI_LOCALNRANKS OMPI_COMM_WORLD_LOCAL_SIZE")) {
      unsetenv(name.c_str());
    }
    for (const std::string& setting : split(settings)) {
      const size_t end = setting.find('=');
      names_.push_back(setting.substr(0, end));
      setenv(names_.back().c_str(), setting.substr(end + 1).c_str(), 1);
    }
  }
  ~Variables() {
    for (const std::string& name : names_) unsetenv(name.c_str());
  }

 private:
  std::vector<std::string> names_;
};

struct Placed {
  std::string environment;
  std::string arguments;
  std::string expected;  ///< some fields of dry_run()
  std::string warned;    ///< a part of the field "warning"
};

/// Returns the fields of the first line of --dry-run, the field `trainers` of --print-config, and
/// `ranks`, `gpu_places` (by rank) and `warning` of all lines.
Json dry_run(const app::JobCommand& job, const std::string& arguments) {
  std::istringstream lines(written_to(STDOUT_FILENO, [&] {
    const auto args = split("--dry-run --print-config " + arguments);
    CHECK(app::run_job_command(job, args, base::Clock::now()) == 0);
  }));
  Json all{{"ranks", Json::array()}, {"gpu_places", Json::object()}, {"warning", ""}}, line;
  for (std::string text; std::getline(lines, text);) {
    line = Json::parse(text);
    if (line["event"] == "config") all["trainers"] = line["config"]["trainers"];
    if (line["event"] == "warn") all["warning"] = line["message"];
    if (line["event"] != "plan") continue;
    for (const auto& [name, value] : line.items()) {
      if (!all.contains(name)) all[name] = value;
    }
    all["ranks"].push_back(line["rank"]);
    all["gpu_places"][line["rank"].dump()] = line["gpu_turn"];
  }
  CHECK(line["event"] == "end");
  return all;
}

void check_placed(const std::vector<Placed>& all) {
  const app::JobCommand hybrid(cmd::hybrid_job());
  for (const Placed& placed : all) {
    CAPTURE(placed.environment, placed.arguments);
    const Variables set(placed.environment);
    const Json text = dry_run(hybrid, placed.arguments);
    const Json expected = Json::parse(placed.expected);
    for (const auto& [name, value] : expected.items()) {
      CAPTURE(name);
      CHECK(text[name] == value);
    }
    CHECK(text["warning"].get<std::string>().find(placed.warned) != std::string::npos);
  }
}

const std::string kTorchrun = "RANK=1 WORLD_SIZE=5 MASTER_ADDR=m MASTER_PORT=1234";
const std::string kOpenMpi =
    "MASTER_ADDR=m OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2";
const std::string kSlurm = "SLURM_PROCID=3 SLURM_NTASKS=6";

}  // namespace

TEST_CASE("the launcher's job ID and restart count are those of the job") {
  const std::string elastic = "RANK=1 WORLD_SIZE=4 TORCHELASTIC_RESTART_COUNT=2";
  const std::string step = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=77 SLURM_STEP_ID=3";
  check_placed({
      {"", "--rank 1", R"({"job_id": null, "generation": null})"},
      {"RANK=1 WORLD_SIZE=4", "", R"({"job_id": null, "generation": null})"},
      {elastic + " TORCHELASTIC_RUN_ID=r9 LOCAL_WORLD_SIZE=4", "",
       R"({"job_id": "torchrun r9", "generation": 2})"},
      {elastic + " TORCHELASTIC_RUN_ID=none LOCAL_WORLD_SIZE=4", "", R"({"job_id": null})"},
      // With several hosts the restart count is ignored, because each host counts its own restarts.
      {elastic + " TORCHELASTIC_RUN_ID=r9 LOCAL_WORLD_SIZE=2 MASTER_ADDR=m", "",
       R"({"job_id": "torchrun r9", "generation": null})"},
      {kOpenMpi + " PMIX_NAMESPACE=prterun-1@1", "", R"({"job_id": "mpirun prterun-1@1"})"},
      {step + " SLURM_RESTART_COUNT=1", "", R"({"job_id": "slurm 77.3", "generation": 1})"},
      {step + " SLURM_HET_JOB_ID=76", "", R"({"job_id": "slurm 76.3"})"},
      {step + " PMI_RANK=1 PMI_SIZE=4", "", R"({"job_id": "slurm 77.3"})"},
      {step, "--rank 2", R"({"job_id": "slurm 77", "generation": 0})", "SLURM_PROCID=1"},
      {step, "--spawn", R"({"job_id": null, "generation": null})"},
  });
}

// A fixed port (29500, or that of torchrun's agent) would collide when two jobs share a host.
TEST_CASE("a job with an ID has its own port, which each of its ranks can derive") {
  const std::string step = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=77 SLURM_STEP_ID=";
  const std::string agents = " TORCHELASTIC_USE_AGENT_STORE=True";
  check_placed({
      {step + "3", "", R"({"master_port": 24770})"},
      {step + "4", "", R"({"master_port": 26828})"},
      {step + "3", "--job-id mine", R"({"master_port": 27339})"},
      {"", "--rank 1 --job-id mine", R"({"master_port": 27339})"},
      {"", "--ranks 2-3 --job-id mine", R"({"master_port": 27339})"},
      {step + "3", "--master-port 99", R"({"master_port": 99})"},
      {kTorchrun + agents, "", R"({"master_port": 20814})"},
      {"RANK=1 WORLD_SIZE=5 MASTER_ADDR=m MASTER_PORT=1235" + agents, "",
       R"({"master_port": 25716})"},
      {kTorchrun + " TORCHELASTIC_USE_AGENT_STORE=False", "", R"({"master_port": 1234})"},
      {"MASTER_PORT=tcp://10.0.0.1:80", "--rank 1", R"({"master_port": 29500})"},
  });
}

TEST_CASE("ranks that are all on one host, according to their launcher, need no port") {
  const std::string open_mpi = "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 ";
  const std::string step = "SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_JOB_ID=77 SLURM_STEP_ID=3 ";
  check_placed({
      {open_mpi + "OMPI_COMM_WORLD_LOCAL_SIZE=4", "", R"({"one_host": true, "local_ranks": 4})"},
      {kOpenMpi, "", R"({"one_host": false, "local_ranks": 2})"},
      {open_mpi + "OMPI_COMM_WORLD_LOCAL_SIZE=4", "--rank 1", R"({"one_host": false})"},
      {step + "SLURM_STEP_NUM_NODES=1", "", R"({"one_host": true, "local_ranks": 4})"},
      {step + "SLURM_STEP_NUM_NODES=2", "--master-addr m", R"({"one_host": false})"},
      {step, "", R"({"one_host": false})"},
      {"", "--rank 1", R"({"one_host": false, "local_ranks": 4})"},
  });
}

TEST_CASE("the first source that places a rank wins") {
  check_placed({
      {"", "", R"({"mode": "spawn", "ranks": [0, 1, 2, 3], "master_port": null})"},
      {"", "--trainers 5", R"({"ranks": [0, 1, 2, 3, 4, 5, 6]})"},
      {"", "--world-size 6", R"({"trainers": 4})"},
      {"", "--rank 1", R"({"mode": "join", "rank": 1, "world_size": null, "master_port": 29500})"},
      {"", "--rank 0", R"({"world_size": 4})"},
      {"", "--rank 1 --trainers 3", R"({"world_size": 5})"},
      {kTorchrun, "",
       R"({"rank": 1, "world_size": 5, "role": "trainer1", "master_addr": "m", "master_port": 1234, "warning": ""})"},
      {"RANK=3 WORLD_SIZE=5", "", R"({"rank": 3, "role": "master"})"},  // after three trainers
      {kTorchrun + " TORCHELASTIC_USE_AGENT_STORE=True", "--master-port 99",
       R"({"master_port": 99})"},
      {kTorchrun, "--rank 2", R"({"rank": 2, "source": "--rank"})", "RANK=1"},
      {kTorchrun, "--master-addr n", R"({"master_addr": "n"})", "MASTER_ADDR=m"},
      {"RANK=x", "--rank 2", R"({"rank": 2})", "RANK=x"},
      {kTorchrun, "--spawn",
       R"({"mode": "spawn", "ranks": [0, 1, 2, 3], "master_port": null, "warning": ""})"},
      {kTorchrun, "--local", R"({"mode": "local", "warning": ""})"},
      {kOpenMpi, "", R"({"rank": 2, "world_size": 4})"},
      {kOpenMpi + " " + kSlurm + " PMI_RANK=1 PMI_SIZE=5 SLURM_STEP_ID=0", "", R"({"rank": 2})"},
      {kSlurm + " PMI_RANK=1 PMI_SIZE=5 SLURM_STEP_ID=0", "", R"({"rank": 1, "world_size": 5})"},
      {kSlurm + " SLURM_STEP_ID=0", "", R"({"rank": 3, "world_size": 6})"},
      {kSlurm, "", R"({"mode": "spawn"})"},
      {kOpenMpi + " RANK=1 WORLD_SIZE=4", "", R"({"rank": 1})"},
      {"", "--ranks 0,2-3", R"({"mode": "spawn", "ranks": [0, 2, 3], "master_port": 29500})"},
      {"", "--ranks 2-3", R"({"ranks": [2, 3], "world_size": null})"},
      {"", "--ranks 0-3", R"({"ranks": [0, 1, 2, 3], "master_port": null})"},
      {"MASTER_ADDR=m MASTER_PORT=1234", "--ranks 2-3",
       R"({"master_addr": "m", "master_port": 1234, "ranks": [2, 3]})"},
      {"RANK=1", "--ranks 0-1", R"({"mode": "spawn"})", "RANK=1"},
  });
}

// The GPU's index is the local rank or, if no launcher sets a local rank, the number of lower ranks
// on this host that use GPUs.
TEST_CASE("a rank knows which of the GPUs of its host it uses") {
  check_placed({
      {"", "--device cuda", R"({"gpu_places": {"0": 0, "1": 1, "2": null, "3": 2}})"},
      {"", "", R"({"gpu_places": {"0": null, "1": null, "2": null, "3": null}})"},
      {"", "--ranks 2-3 --device cuda", R"({"gpu_places": {"2": null, "3": 0}})"},
      {"", "--local --device cuda", R"({"gpu_places": {"0": 0}})"},
      {"", "--rank 3 --device cuda", R"({"gpu_places": {"3": 2}})"},
      {"", "--rank 3 --device cuda --master-addr 10.0.0.1", R"({"gpu_places": {"3": 2}})"},
      {"", "--rank 5 --device cuda --trainers 8 --master-addr 10.0.0.1",
       R"({"gpu_places": {"5": 5}})"},
      {"", "--rank 1 --device cuda:1", R"({"gpu_places": {"1": null}})"},
      {"", "--rank 3 --device trainer=cuda", R"({"gpu_places": {"3": null}})"},
      {kTorchrun + " LOCAL_RANK=0", "--device cuda", R"({"gpu_places": {"1": 0}})"},
      {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1",
       "--device cuda", R"({"gpu_places": {"3": 1}})"},
      {"PMI_RANK=1 PMI_SIZE=5 MPI_LOCALRANKID=3", "--device cuda", R"({"gpu_places": {"1": 3}})"},
      {kSlurm + " SLURM_STEP_ID=0 SLURM_LOCALID=1", "--device cuda", R"({"gpu_places": {"3": 1}})"},
      // SLURM_LOCALID without a step ID is that of a batch script, so it is ignored.
      {"SLURM_LOCALID=1", "--rank 3 --trainers 4 --device cuda", R"({"gpu_places": {"3": 3}})"},
      {"LOCAL_RANK=3", "--spawn --device cuda",
       R"({"gpu_places": {"0": 0, "1": 1, "2": null, "3": 2}})"},
  });
}

TEST_CASE("an invalid environment is refused, naming the variable") {
  const std::vector<std::array<std::string, 3>> all = {
      {"LOCAL_RANK=x", "--rank 1 --device cuda", "LOCAL_RANK must be"},
      {"SLURM_STEP_ID=0 SLURM_LOCALID=-1", "--rank 1 --device cuda", "SLURM_LOCALID must be"},
      {"RANK=x", "", "RANK must be"},
      {"RANK=", "", "RANK must be"},
      {"RANK=-1", "", "RANK must be"},
      {"RANK=0 WORLD_SIZE=four", "", "WORLD_SIZE must be"},
      {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=0", "", "OMPI_COMM_WORLD_SIZE must be"},
      {"RANK=0 WORLD_SIZE=4 MASTER_PORT=70000", "", "MASTER_PORT must be"},
      {"RANK=0 WORLD_SIZE=4 MASTER_ADDR=", "", "MASTER_ADDR is empty"},
      {"RANK=5 WORLD_SIZE=4", "", "there is no rank 5"},
      {"RANK=0 WORLD_SIZE=4", "--trainers 3", "WORLD_SIZE says 4"},
      {"PMI_RANK=0 PMI_SIZE=1", "", "--spawn starts every rank here"},
      // Refused because without a master address a rank on another host cannot find rank 0.
      {"OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2", "",
       "need --master-addr HOST"},
      {"SLURM_PROCID=3 SLURM_NTASKS=6 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2", "",
       "as SLURM_STEP_NUM_NODES says, need --master-addr HOST"},
  };
  const app::JobCommand hybrid(cmd::hybrid_job());
  for (const auto& [settings, arguments, told] : all) {
    CAPTURE(settings);
    const Variables set(settings);
    check_refused(hybrid, split("--dry-run " + arguments), told);
  }
}
