#include "distrain/app/placement.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <set>

#include <fmt/format.h>

#include "distrain/base/error.h"

namespace distrain::app {
namespace {

using base::invalid;

constexpr int kMaxWorld = 1024;
constexpr int kJoiningPort = 29500;

/// A number and where it comes from: "--rank", "OMPI_COMM_WORLD_RANK".
struct Setting {
  int value = 0;
  std::string source;
};

std::optional<int> whole(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// A launcher that starts one process a rank and says so in the environment.
struct ProcessLauncher {
  const char* rank;
  const char* size;
  const char* only_with;  // set only where `rank` means this process
  std::vector<const char*> local_size;
};

const std::vector<ProcessLauncher>& process_launchers() {
  // In the order of section 2. Inside an allocation mpirun's children see the SLURM_* variables of
  // its own daemons, so Slurm comes last; a batch script has SLURM_PROCID but no SLURM_STEP_ID.
  static const std::vector<ProcessLauncher> kLaunchers = {
      {"RANK", "WORLD_SIZE", nullptr, {"LOCAL_WORLD_SIZE"}},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", nullptr, {"OMPI_COMM_WORLD_LOCAL_SIZE"}},
      {"PMI_RANK", "PMI_SIZE", nullptr, {"MPI_LOCALNRANKS"}},
      {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", {}},
  };
  return kLaunchers;
}

class Placer {
 public:
  Placer(ParsedOptions& options, const SizeRule& rule, const Environment& environment,
         const std::function<void()>& on_rank_0)
      : options_(options), rule_(rule), environment_(environment), on_rank_0_(on_rank_0) {}

  Placement run() {
    check_combinations();
    if (options_.flag("local")) {
      placement_.mode = Placement::Mode::kLocal;
      on_rank_0_();
      settle_size(flag_setting("world-size"), true);
      return placement_;
    }
    find_launcher();
    const std::optional<Setting> rank = find_rank();
    if (rank) {
      join(*rank);
    } else {
      spawn();
    }
    return placement_;
  }

 private:
  void check_combinations() {
    const auto exclude = [this](const char* a, const char* b) {
      if (options_.given(a) && options_.given(b)) invalid(fmt::format("--{} excludes --{}", a, b));
    };
    for (const char* other : {"rank", "ranks", "spawn"}) exclude("local", other);
    for (const char* other : {"ranks", "spawn"}) exclude("rank", other);
  }

  /// The first launcher whose rank variable is there.
  void find_launcher() {
    for (const ProcessLauncher& launcher : process_launchers()) {
      if (launcher.only_with && !environment_(launcher.only_with)) continue;
      if (environment_(launcher.rank)) {
        launcher_ = &launcher;
        return;
      }
    }
  }

  std::optional<Setting> flag_setting(const char* name) const {
    if (!options_.given(name)) return std::nullopt;
    return Setting{static_cast<int>(options_.integer(name)), fmt::format("--{}", name)};
  }

  Setting variable_setting(const char* name, int min, int max) const {
    const std::string text = environment_(name).value_or("");
    const std::optional<int> value = whole(text);
    if (!value || *value < min || *value > max) {
      invalid(
          fmt::format("the environment variable {} must be a whole number from {} to {}, not '{}'",
                      name, min, max, text));
    }
    return Setting{*value, name};
  }

  /// A flag goes before the environment, which is not even required to make sense then.
  void warn_if_other(const std::string& flag, const std::string& value, const char* name) {
    const std::optional<std::string> other = environment_(name);
    if (!other || *other == value) return;
    placement_.warn(
        fmt::format("{} {} overrides {}={} of the environment", flag, value, name, *other));
  }

  std::optional<Setting> find_rank() {
    if (options_.given("spawn") || options_.given("ranks")) {
      if (options_.given("ranks") && launcher_) {
        warn_if_other("--ranks", options_.text("ranks"), launcher_->rank);
      }
      return std::nullopt;
    }
    if (const auto flag = flag_setting("rank")) {
      if (launcher_) warn_if_other("--rank", std::to_string(flag->value), launcher_->rank);
      return flag;
    }
    if (!launcher_) return std::nullopt;
    return variable_setting(launcher_->rank, 0, kMaxWorld - 1);
  }

  /// A size that the environment names counts for a process that is one rank only.
  std::optional<Setting> find_size() {
    const char* variable = launcher_ ? launcher_->size : "WORLD_SIZE";
    if (const auto flag = flag_setting("world-size")) {
      warn_if_other("--world-size", std::to_string(flag->value), variable);
      return flag;
    }
    if (options_.given(rule_.option)) {
      const int size = static_cast<int>(options_.integer(rule_.option)) + rule_.extra_ranks;
      const auto other = environment_(variable);
      if (options_.given("rank") && other && *other != std::to_string(size)) {
        warn_if_other(fmt::format("--{} makes a world of", rule_.option), std::to_string(size),
                      variable);
        return std::nullopt;
      }
    }
    if (!environment_(variable)) return std::nullopt;
    return variable_setting(variable, 1, kMaxWorld);
  }

  /// World size and the size option follow from each other. `known`: the default counts, because
  /// rank 0 is here; otherwise rank 0 will tell.
  void settle_size(const std::optional<Setting>& size, bool known) {
    const int extra = rule_.extra_ranks;
    const int wanted = static_cast<int>(options_.integer(rule_.option)) + extra;
    if (!size) {
      if (known || options_.given(rule_.option)) placement_.world_size = wanted;
    } else {
      if (size->value <= extra) {
        invalid(fmt::format("{} {} is too small: the job needs {} ranks beside its {}{}",
                            size->source, size->value, extra, rule_.option,
                            size->source[0] == '-' ? "" : " (--spawn starts every rank here)"));
      }
      if (options_.given(rule_.option) && wanted != size->value) {
        invalid(fmt::format("--{} {} makes a world of {} ranks, {} says {}", rule_.option,
                            options_.text(rule_.option), wanted, size->source, size->value));
      }
      placement_.world_size = size->value;
      if (!options_.given(rule_.option)) {
        options_.derive(rule_.option, std::to_string(size->value - extra));
      }
    }
    if (placement_.world_size > kMaxWorld) {
      invalid(fmt::format("a world of {} ranks is too large: {} at most", placement_.world_size,
                          kMaxWorld));
    }
  }

  void check_rank(int rank, const std::string& source) const {
    if (placement_.world_size != 0 && rank >= placement_.world_size) {
      invalid(fmt::format("{}: there is no rank {} in a world of {} ranks", source, rank,
                          placement_.world_size));
    }
  }

  void find_master() {
    placement_.master_addr = options_.text("master-addr");
    placement_.master_addr_given = options_.given("master-addr");
    if (placement_.master_addr_given) {
      warn_if_other("--master-addr", placement_.master_addr, "MASTER_ADDR");
    } else if (const auto address = environment_("MASTER_ADDR")) {
      if (address->empty()) invalid("the environment variable MASTER_ADDR is empty");
      placement_.master_addr = *address;
      placement_.master_addr_given = true;
    }
    placement_.master_port = kJoiningPort;
    if (const auto flag = flag_setting("master-port")) {
      placement_.master_port = flag->value;
      warn_if_other("--master-port", std::to_string(flag->value), "MASTER_PORT");
    } else if (environment_("MASTER_PORT")) {
      const int port = variable_setting("MASTER_PORT", 1, 65535).value;
      // torchrun's agent listens on MASTER_PORT itself then; every rank takes the one beside it.
      const bool taken = environment_("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
      placement_.master_port = !taken ? port : port < 65535 ? port + 1 : port - 1;
    }
  }

  void join(const Setting& rank) {
    placement_.mode = Placement::Mode::kJoin;
    placement_.rank = rank.value;
    placement_.source = rank.source;
    if (rank.value == 0) on_rank_0_();
    settle_size(find_size(), rank.value == 0);
    check_rank(rank.value, rank.source);
    find_master();
    placement_.local_ranks = ranks_on_this_host();
  }

  /// For the share of the cores; without a word from anyone, no address means one machine.
  int ranks_on_this_host() const {
    if (launcher_) {
      for (const char* name : launcher_->local_size) {
        if (const auto count = whole(environment_(name).value_or("")); count && *count > 0) {
          return *count;
        }
      }
    }
    if (placement_.master_addr_given && placement_.master_addr != "localhost" &&
        placement_.master_addr != "127.0.0.1") {
      return 1;
    }
    if (placement_.world_size != 0) return placement_.world_size;
    return static_cast<int>(options_.integer(rule_.option)) + rule_.extra_ranks;
  }

  void spawn() {
    placement_.mode = Placement::Mode::kSpawn;
    const std::optional<Setting> size = flag_setting("world-size");
    if (options_.given("ranks")) {
      placement_.ranks = parse_ranks(options_.text("ranks"));
      if (placement_.ranks.front() == 0) on_rank_0_();
      settle_size(size, placement_.ranks.front() == 0);
      check_rank(placement_.ranks.back(), "--ranks");
    } else {
      on_rank_0_();
      settle_size(size, true);
      for (int rank = 0; rank < placement_.world_size; ++rank) placement_.ranks.push_back(rank);
    }
    placement_.local_ranks = static_cast<int>(placement_.ranks.size());
    if (!placement_.spawns_all()) {
      find_master();
      return;
    }
    // All here: what the environment says of a master is about some other job.
    placement_.master_addr = options_.text("master-addr");
    placement_.master_addr_given = options_.given("master-addr");
    if (const auto port = flag_setting("master-port")) placement_.master_port = port->value;
  }

  static std::vector<int> parse_ranks(const std::string& text) {
    std::set<int> ranks;
    const auto malformed = [&text] {
      invalid(fmt::format("--ranks must be a list like 0-3 or 0,2-3, not '{}'", text));
    };
    for (size_t at = 0; at <= text.size();) {
      const size_t comma = std::min(text.find(',', at), text.size());
      const std::string_view part = std::string_view(text).substr(at, comma - at);
      const size_t dash = part.find('-');
      const std::optional<int> first = whole(part.substr(0, dash));
      const std::optional<int> last =
          dash == std::string_view::npos ? first : whole(part.substr(dash + 1));
      if (!first || !last || *first < 0 || *last < *first || *last >= kMaxWorld) malformed();
      for (int rank = *first; rank <= *last; ++rank) {
        if (!ranks.insert(rank).second) invalid(fmt::format("--ranks names rank {} twice", rank));
      }
      at = comma + 1;
    }
    return {ranks.begin(), ranks.end()};
  }

  ParsedOptions& options_;
  const SizeRule& rule_;
  const Environment& environment_;
  const std::function<void()>& on_rank_0_;
  const ProcessLauncher* launcher_ = nullptr;
  Placement placement_;
};

}  // namespace

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

Placement place(ParsedOptions& options, const SizeRule& rule, const Environment& environment,
                const std::function<void()>& on_rank_0) {
  return Placer(options, rule, environment, on_rank_0).run();
}

}  // namespace distrain::app
