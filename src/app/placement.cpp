#include "placement.h"

#include <numeric>

#include "distrain/base/process.h"
#include "distrain/cuda/load.h"
#include "distrain/membership/slot.h"
#include "program.h"

namespace distrain::app {
namespace {

using base::variable;

constexpr int kMaxWorld = 1024;
constexpr uint16_t kJoiningPort = 29500;

/// A number and its source: an option ("--rank") or a variable ("OMPI_COMM_WORLD_RANK").
struct Setting {
  int value = 0;
  std::string source;
};

/// Converts a checked option value to a number. The rank "auto" becomes kUnassignedRank.
int number_of(const std::string& text) {
  return base::number<int>(text).value_or(membership::kUnassignedRank);
}

/// Parses the environment variable `name`, which must be set, as a value of `option`.
Setting setting_of(const char* name, const job::Option& option) {
  const std::string where = fmt::format("the environment variable {}", name);
  return {number_of(canonical_value(option, *variable(name), where)), name};
}

/// An external launcher that starts one process per rank, and the variables that it sets.
struct ProcessLauncher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // null if the launcher sets no such variable
  const char* only_with;   // null, or a variable without which the others are another process's

  bool says(const char* name) const {
    return variable(name) && (!only_with || variable(only_with));
  }
};

// Slurm is last, because children of an mpirun in a Slurm allocation inherit SLURM_* variables of
// mpirun's daemons. Slurm needs SLURM_STEP_ID, because a batch script outside a step is no rank.
constexpr ProcessLauncher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_STEP_ID"},
};

/// A Kubernetes Indexed Job. Used only if rank 0's address is set, as an index alone is no rank.
constexpr ProcessLauncher kIndexedJob = {"JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK",
                                         nullptr, nullptr};

class Placer {
 public:
  Placer(job::ParsedOptions& options, const job::AnyDefinition& job,
         const std::function<void()>& on_rank_0)
      : options_(options),
        job_(job),
        count_option_(job.info().count_option),
        on_rank_0_(on_rank_0) {}

  Placement run() {
    const auto exclude = [this](const char* a, const char* b) {
      const std::string from = options_.origin(a), other = options_.origin(b);
      const std::string where = from == other ? "" : fmt::format(" ({}, {})", from, other);
      if (options_.given(a) && options_.given(b)) invalid("--{} excludes --{}{}", a, b, where);
    };
    for (const char* other : {"rank", "ranks", "spawn"}) exclude("local", other);
    for (const char* other : {"ranks", "spawn"}) exclude("rank", other);
    if (options_.flag("local")) {
      placement_.mode = Placement::Mode::kLocal;
      on_rank_0_();
      settle_size(flag_setting("world-size"), true);
      return placement_;
    }
    placement_.master_addr = options_.text("master-addr");
    placement_.master_addr_given = options_.given("master-addr");
    placement_.master_port = static_cast<uint16_t>(options_.integer("master-port"));
    const bool has_address = placement_.master_addr_given || variable("MASTER_ADDR");
    const auto is_used = [](const ProcessLauncher& each) { return each.says(each.rank); };
    const auto launcher = std::ranges::find_if(kLaunchers, is_used);
    if (launcher != std::end(kLaunchers)) launcher_ = launcher;
    if (!launcher_ && has_address && is_used(kIndexedJob)) launcher_ = &kIndexedJob;
    const char* name = launcher_ ? launcher_->rank : "RANK";
    // An Indexed Job may start several ranks in a pod; then its index is no rank.
    if (options_.given("ranks") && launcher_ != &kIndexedJob) {
      warn_if_other("--ranks", options_.text("ranks"), name);
    }
    const bool spawns = options_.given("spawn") || options_.given("ranks");
    if (const auto rank = spawns ? std::nullopt : find("rank", name)) {
      join(*rank);
    } else {
      spawn();
    }
    return placement_;
  }

 private:
  std::optional<Setting> flag_setting(const char* name) const {
    if (!options_.given(name)) return std::nullopt;
    return Setting{number_of(options_.text(name)), fmt::format("--{}", name)};
  }

  /// Returns the number of ranks that the job's own options imply.
  int own_size() const { return job_.roles(options_).world_size(); }

  /// Returns the number of ranks that `count_option_` does not count.
  int other_ranks() const {
    job::ParsedOptions completed = options_;  // the option's value may be derived from others
    job_.complete(completed);
    return job_.roles(completed).world_size() - static_cast<int>(completed.integer(count_option_));
  }

  void warn_if_other(const std::string& flag, const std::string& value, const char* name) {
    const std::string set = variable(name).value_or(value);
    if (set == value) return;
    placement_.warn(flag + ' ' + value + " overrides " + name + '=' + set + " of the environment");
  }

  /// Returns the value of `option` or, if it is not given, of the variable `name`, if that is set.
  std::optional<Setting> find(const char* option, const char* name) {
    if (const auto flag = flag_setting(option)) {
      warn_if_other(flag->source, options_.text(option), name);
      return flag;
    }
    if (!variable(name)) return std::nullopt;
    const Setting setting = setting_of(name, *find_option(options_.table(), option));
    options_.derive(option, *variable(name), "environment variable " + setting.source);
    return setting;
  }

  /// Finds the world size. Ignores the environment if --rank and the job's options imply a size.
  std::optional<Setting> find_size() {
    const char* name = launcher_ ? launcher_->size : "WORLD_SIZE";
    const std::string own = std::to_string(own_size());
    if (options_.given(count_option_) && options_.given("rank") && !options_.given("world-size") &&
        variable(name).value_or(own) != own) {
      warn_if_other(fmt::format("--{} makes a world of", count_option_), own, name);
      return std::nullopt;
    }
    return find("world-size", name);
  }

  /// Sets the world size to `size` and derives the job's own option for a number of ranks from it.
  /// If `size` is not set, derives the world size from that option, by its default only if rank 0
  /// runs here (`known`).
  void settle_size(const std::optional<Setting>& size, bool known) {
    const bool given = options_.given(count_option_);
    if (!size) {
      if (known || given) placement_.world_size = own_size();
    } else {
      if (size->value <= other_ranks()) {
        invalid("{} {} is too small: the job needs {} ranks beside its {}{}", size->source,
                size->value, other_ranks(), count_option_,
                size->source[0] == '-' ? "" : " (--spawn starts every rank here)");
      }
      if (given && own_size() != size->value) {
        invalid("--{} {} makes a world of {} ranks, {} says {}", count_option_,
                options_.text(count_option_), own_size(), size->source, size->value);
      }
      placement_.world_size = size->value;
      if (!given) options_.derive(count_option_, std::to_string(size->value - other_ranks()));
    }
    if (placement_.world_size > kMaxWorld) {
      invalid("a world of {} ranks is too large: {} at most", placement_.world_size, kMaxWorld);
    }
  }

  void find_address() {
    if (placement_.master_addr_given) {
      warn_if_other("--master-addr", placement_.master_addr, "MASTER_ADDR");
    } else if (const auto address = variable("MASTER_ADDR")) {
      if (address->empty()) invalid("the environment variable MASTER_ADDR is empty");
      placement_.master_addr = *address;
      placement_.master_addr_given = true;
      options_.derive("master-addr", *address, "environment variable MASTER_ADDR");
    }
  }

  void find_port() {
    // Ignore a URL in MASTER_PORT: Kubernetes sets it if a service is called "master".
    const std::string in_environment = variable("MASTER_PORT").value_or("");
    const bool is_service = in_environment.find("://") != std::string::npos;
    const auto port = is_service ? flag_setting("master-port") : find("master-port", "MASTER_PORT");
    // If torchrun's agent itself listens on MASTER_PORT, all ranks derive another port.
    const bool is_agents =
        variable("TORCHELASTIC_USE_AGENT_STORE") == "True" && port && port->source == "MASTER_PORT";
    const std::string id = options_.given("job-id") ? options_.text("job-id") : placement_.job_id;
    placement_.master_port = is_agents    ? membership::port_of_job(id + ' ' + in_environment)
                             : port       ? static_cast<uint16_t>(port->value)
                             : id.empty() ? kJoiningPort
                                          : membership::port_of_job(id);
    if (is_agents || (!port && !id.empty())) {
      options_.derive("master-port", std::to_string(placement_.master_port));
    }
  }

  void find_job_id() {
    if (!launcher_) return;
    const std::string launcher = launcher_->rank;
    const bool is_whole = placement_.source == launcher;
    const auto restarts = [this](const char* name) {
      placement_.generation = base::number<uint32_t>(variable(name).value_or("")).value_or(0);
    };
    if (launcher == "RANK") {
      const auto id = variable("TORCHELASTIC_RUN_ID");
      if (id && *id != "none") placement_.job_id = "torchrun " + *id;
      // Use the restart count on one host only, because each host's agent counts its own restarts.
      const bool is_one_host = variable("LOCAL_WORLD_SIZE") == variable("WORLD_SIZE");
      if (is_one_host) restarts("TORCHELASTIC_RESTART_COUNT");
    } else if (launcher == "OMPI_COMM_WORLD_RANK") {
      if (const auto id = variable("PMIX_NAMESPACE")) placement_.job_id = "mpirun " + *id;
    } else if (launcher == "PMI_RANK") {
      // Hydra sets no job id, so use the process id of pmi_proxy: each host has one per job.
      const auto proxy = placement_.one_host ? base::ancestor("pmi_proxy") : std::nullopt;
      if (proxy) {
        placement_.job_id = fmt::format("hydra {}", *proxy);
      } else if (variable("SLURM_STEP_ID")) {
        find_slurm_id(is_whole);
      }
    } else if (launcher == "SLURM_PROCID") {
      find_slurm_id(is_whole);
      restarts("SLURM_RESTART_COUNT");
    }
    if (!placement_.job_id.empty()) options_.derive("job-id", placement_.job_id);
  }

  /// Sets the job id to Slurm's. Appends Slurm's step id if `is_step`. The caller leaves that out
  /// for ranks set by --rank, which may be in several steps. All parts of a heterogeneous job get
  /// the same id.
  void find_slurm_id(bool is_step) {
    auto id = variable("SLURM_HET_JOB_ID");
    if (!id) id = variable("SLURM_JOB_ID");
    if (!id) return;
    placement_.job_id = "slurm " + *id + (is_step ? '.' + *variable("SLURM_STEP_ID") : "");
  }

  /// Returns the number of ranks that the launcher started on this host, or null if unknown.
  std::optional<int> told_local_ranks() const {
    const char* name = launcher_ ? launcher_->local_size : nullptr;
    const auto count = base::number<int>(name ? variable(name).value_or("") : "");
    return count && *count > 0 ? count : std::nullopt;
  }

  /// Returns true if the launcher says that all ranks are on this host. Throws `invalid` if ranks
  /// are on other hosts and rank 0's address is unknown, because joining could only time out.
  bool is_one_host() const {
    const auto nodes = variable("SLURM_STEP_ID") ? variable("SLURM_STEP_NUM_NODES") : std::nullopt;
    const auto local = told_local_ranks();
    if (!local && !nodes) return false;
    const bool is_one = local ? *local == placement_.world_size : nodes == "1";
    if (!is_one && !placement_.master_addr_given) {
      invalid("ranks on several hosts, as {} says, need --master-addr HOST, the host of rank 0",
              local ? launcher_->local_size : "SLURM_STEP_NUM_NODES");
    }
    return is_one;
  }

  void join(const Setting& rank) {
    placement_.mode = Placement::Mode::kJoin;
    placement_.rank = rank.value;
    placement_.source = rank.source;
    if (rank.value == 0) on_rank_0_();
    const std::optional<Setting> size = find_size();
    settle_size(size, rank.value == 0);
    placement_.check_rank(rank.value, rank.source);
    // If the number of local ranks is unknown, assume all ranks are local until all have joined.
    const int all = placement_.world_size != 0 ? placement_.world_size : own_size();
    placement_.local_ranks = told_local_ranks().value_or(all);
    const bool is_launchers =
        launcher_ && rank.source == launcher_->rank && size && size->source == launcher_->size;
    // A Kubernetes pod has its own log and shares no terminal. RANK without torchrun means a pod.
    const bool is_pod =
        launcher_ == &kIndexedJob || (rank.source == "RANK" && !variable("TORCHELASTIC_RUN_ID"));
    placement_.shares_terminal = launcher_ && rank.source == launcher_->rank && !is_pod;
    find_address();
    if (is_pod) listen_for_pods();
    placement_.one_host = is_launchers && is_one_host();
    find_job_id();
    find_port();
  }

  /// Lets rank 0 in a pod listen on all interfaces if MASTER_ADDR is localhost, because some
  /// operators set that in rank 0's pod only. Without a token, all ranks must be on this host.
  void listen_for_pods() {
    const bool has_token = options_.given("token-file") || variable("DISTRAIN_TOKEN");
    if (placement_.rank != 0 || !has_token || options_.given("listen")) return;
    if (placement_.master_addr == "localhost" && !options_.given("master-addr")) {
      options_.derive("listen", "0.0.0.0");
    }
  }

  void spawn() {
    const std::optional<Setting> size = flag_setting("world-size");
    if (options_.given("ranks")) {
      placement_.ranks = parse_ranks(options_.text("ranks"));
      if (placement_.ranks.front() == 0) on_rank_0_();
      settle_size(size, placement_.ranks.front() == 0);
      placement_.check_rank(placement_.ranks.back(), "--ranks");
    } else {
      on_rank_0_();
      settle_size(size, true);
      for (int rank = 0; rank < placement_.world_size; ++rank) placement_.ranks.push_back(rank);
    }
    placement_.local_ranks = static_cast<int>(placement_.ranks.size());
    // If all ranks start here, MASTER_ADDR and MASTER_PORT belong to another job: ignore them.
    if (placement_.spawns_all()) return;
    find_address();
    find_port();
  }

  static std::vector<int> parse_ranks(const std::string& text) {
    std::set<int> ranks;
    for (const std::string_view part : base::split(text, ',')) {
      const size_t dash = part.find('-');
      const std::optional<int> first = base::number<int>(part.substr(0, dash));
      const std::optional<int> last =
          dash == std::string::npos ? first : base::number<int>(part.substr(dash + 1));
      if (!first || !last || *last < *first || *last >= kMaxWorld) {
        invalid("--ranks must be a list like 0-3 or 0,2-3, not '{}'", text);
      }
      for (int rank = *first; rank <= *last; ++rank) {
        if (!ranks.insert(rank).second) invalid("--ranks names rank {} twice", rank);
      }
    }
    return {ranks.begin(), ranks.end()};
  }

  job::ParsedOptions& options_;
  const job::AnyDefinition& job_;
  const std::string& count_option_;
  const std::function<void()>& on_rank_0_;
  const ProcessLauncher* launcher_ = nullptr;
  Placement placement_;
};

using job::DeviceSpec;

const c10::Device kAnyGpu = c10::kCUDA;

int count_gpus() { return cuda::load().device_count(); }

/// Returns this rank's number on its host from a launcher's variable, if one is set.
std::optional<int> local_rank(const job::OptionTable& table) {
  for (const ProcessLauncher& launcher : kLaunchers) {
    if (!launcher.says(launcher.local_rank)) continue;
    job::Option number = *find_option(table, "rank");
    number.choices.clear();
    return setting_of(launcher.local_rank, number).value;
  }
  return std::nullopt;
}

DeviceSpec device_spec(const ParsedOptions& options, const job::AnyDefinition& job) {
  return {options.text("device"), job.info().roles};
}

}  // namespace

void Placement::check_rank(int number, const std::string& where) const {
  if (world_size == 0 || number < world_size) return;
  invalid("{}: there is no rank {} in a world of {} ranks", where, number, world_size);
}

Placement place(job::ParsedOptions& options, const job::AnyDefinition& job,
                const std::function<void()>& on_rank_0) {
  return Placer(options, job, on_rank_0).run();
}

void check_devices(const ParsedOptions& options, const job::AnyDefinition& job,
                   const Placement& placement) {
  const DeviceSpec spec = device_spec(options, job);
  const bool local = placement.is_local();
  if (local && !spec.for_all()) {
    base::invalid("--device names roles, but --local is one process: name one device");
  }
  if (placement.world_size != 0 && !local) spec.check_ranks(job.roles(options).names());
}

std::optional<int> place_in_turn(const ParsedOptions& options, const job::AnyDefinition& job,
                                 const Placement& placement, int rank, const std::string& name) {
  const DeviceSpec spec = device_spec(options, job);
  if (job.gpus(options, name) || spec.of(name) != kAnyGpu) return std::nullopt;
  if (placement.is_local()) return 0;
  // Count the lower ranks of this host that take GPUs round-robin. If the ranks of this host are
  // unknown, count all lower ranks: consecutive ranks then still get consecutive GPUs.
  std::vector<int> neighbours = placement.ranks;
  if (placement.joins()) {
    if (const auto told = local_rank(options.table())) return *told;
    if (rank == membership::kUnassignedRank) return std::nullopt;
    neighbours.resize(static_cast<size_t>(rank));
    std::iota(neighbours.begin(), neighbours.end(), 0);
  }
  const job::Roles roles = job.roles(options);
  return static_cast<int>(std::ranges::count_if(neighbours, [&](int other) {
    return other < rank && spec.of(roles.name_of(other)) == kAnyGpu;
  }));
}

const std::vector<c10::Device>& RankDevices::get(const std::string& rank_name,
                                                 const job::OptionMap& of_rank_0) {
  if (!devices_.empty()) return devices_;
  const ParsedOptions options = options_.adopting(of_rank_0);
  std::vector<c10::Device> chosen = job::naming_rank(rank_, rank_name, [&] {
    std::vector<c10::Device> devices;
    const auto count = job_.gpus(options, rank_name);
    for (int gpu = 0; gpu < count.value_or(0); ++gpu) {
      const c10::Device wanted(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
      devices.push_back(job::resolve_device(wanted, count_gpus, 0));
    }
    if (!devices.empty()) return devices;
    const c10::Device choice = count ? c10::kCPU : device_spec(options, job_).of(rank_name);
    const auto turn = place_in_turn(options, job_, placement_, rank_, rank_name);
    devices.push_back(job::resolve_device(choice, count_gpus, turn.value_or(0)));
    return devices;
  });
  const std::lock_guard lock(mutex_);
  return devices_ = std::move(chosen);
}

}  // namespace distrain::app
