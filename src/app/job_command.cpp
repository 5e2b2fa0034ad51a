#include <algorithm>
#include <ctime>
#include <fstream>
#include <random>

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include "distrain/base/process.h"
#include "distrain/base/text.h"
#include "distrain/membership/slot.h"
#include "distrain/store/checkpoint_store.h"
#include "process/launcher.h"
#include "process/output.h"
#include "program.h"

namespace distrain::app {
namespace {

// Time limit for the ranks of a launcher without rank 0 to end after a signal. They end when rank 0
// has saved, exited or been silent for --peer-timeout, so only stuck ranks reach this limit.
constexpr auto kAsRank0Ends = std::chrono::hours(1);

/// Returns the `config` field of the `start` line. An option is null if it has no effect with the
/// given --data, or if the user did not give it and rank 0 sets it for this rank (`inherits`).
Json config_of(const ParsedOptions& options, bool inherits) {
  Json config = Json::object();
  const Option* const data = find_option(options.table(), "data");
  const bool has_data = data && is_path(*data, options.text("data"));
  for (const Option& option : options.table()) {
    if (!is_job_option(option)) continue;
    const bool is_idle = has_data ? option.random_only : option.data_only;
    const bool has_none = is_idle || (inherits && !options.given(option.name));
    config[json_name(option)] = has_none ? Json() : json_value(option, options.text(option.name));
  }
  return config;
}

/// Returns the field `data` of the line `start`: the value of --data, or a description of its
/// default. Returns null if rank 0 sets --data.
Json data_of(const ParsedOptions& options, bool inherits) {
  const Option* const option = find_option(options.table(), "data");
  if (!option || (inherits && !options.given("data"))) return {};
  const std::string value = options.text("data");
  return value.empty() ? option->initial_in_words : value;
}

std::string random_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

net::PortRange port_range_of(const std::string& text) {
  if (text.empty()) return {};
  const size_t dash = text.find('-');
  const auto first = base::number<uint16_t>(text.substr(0, dash));
  const auto last = dash == text.npos ? first : base::number<uint16_t>(text.substr(dash + 1));
  if (first && last && *first > 0 && *first <= *last) return {*first, *last};
  invalid("--port-range must be like 30000-30100, not '{}'", text);
}

/// Runs one rank, or the whole job with --local, and ends the process. JSON lines go to a copy of
/// stdout, and stdout becomes stderr, so that output of libraries does not mix with the lines.
int run_here(RankRun run, LogFile* log) {
  run.log = log;
  run.out_fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  leave_process(run_rank(run));
}

/// Runs the ranks that one command starts on this host, or describes them for --dry-run.
class Invocation {
 public:
  Invocation(const JobCommand& command, ParsedOptions options, const Placement& placement,
             base::TimePoint started, std::string token = {})
      : command_(command),
        definition_(*command.definition),
        options_(std::move(options)),
        placement_(placement),
        local_(placement.is_local()),
        job_(make_job(started)) {
    job_.token = std::move(token);
    job_.meeting_name = meeting_name(job_.master_port);
    if (placement.joins() && meets_by_unix_socket()) {
      job_.rank_0_unix_name = job_.meeting_name;
    }
  }

  RankRun make_run() const {
    const bool inherits = job_.rank != 0 && !placement_.spawns_all();
    RankRun run{.job = job_, .data = data_of(options_, inherits)};
    run.job.inject = injection_of(options_, job_.rank);
    run.config = [this, inherits](const OptionMap& of_rank_0) {
      if (of_rank_0.empty()) return config_of(options_, inherits);
      return config_of(options_.adopting(of_rank_0), false);
    };
    if (!job_.spawned) {  // otherwise the launcher prints the warning and shows the progress
      run.warning = placement_.warning;
      run.display = display();
    }
    run.threads = static_cast<int>(options_.integer("threads"));
    run.all_here = local_ || placement_.spawns_all();
    // Ranks that take turns can each use all CPUs.
    run.job.takes_turns = run.all_here && definition_.takes_turns(options_);
    run.local_ranks = run.job.takes_turns ? 1 : placement_.local_ranks;
    if (!run.all_here) {
      run.job.share_cpus = [wanted = run.threads](int ranks) { set_up_threads(wanted, ranks); };
    }
    const bool is_known = job_.world_size != 0 && job_.rank != membership::kUnassignedRank;
    run.role = local_ ? "local" : is_known ? role(job_.rank) : "";
    run.devices = std::make_shared<RankDevices>(options_, definition_, placement_, job_.rank);
    run.job.add_usage = [devices = run.devices](Json& fields) {
      fields["rss_mb"] = peak_rss_mb();
      fields["cpu_s"] = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
      fields.update(devices->usage());
    };
    run.job.choose_devices = std::bind_front(&RankDevices::get, run.devices);
    run.knows_devices = !run.role.empty() && (!inherits || options_.given("device"));
    run.body = [this](const job::Job& job, job::EventSink& sink) {
      return local_ ? definition_.run_local(options_, job, sink)
                    : definition_.run(options_, job, sink);
    };
    return run;
  }

  /// Runs a rank in a process that the launcher started. Returns the exit code.
  int run_spawned(const SpawnedRank& spawned) {
    // Compute the name first, because it depends on the user's job id, which `spawned` may replace.
    const std::string name = meeting_name(spawned.master_port);
    static_cast<membership::Contact&>(job_) = spawned;
    job_.meeting_name = name;
    job_.started = spawned.started;
    job_.spawned = true;
    if (!spawned.resume.empty()) options_.set("resume", spawned.resume);
    if (!spawned.run_id.empty()) job_.effective[job::kRunId] = spawned.run_id;
    RankRun run = make_run();
    run.out_fd = spawned.out_fd;
    run.shows_progress = spawned.shows_progress;
    return run_rank(run);
  }

  int launch(LogFile* log) {
    // Given an address, the user may start more ranks by hand, which would not know a random token.
    const bool is_named = options_.given("master-port") || options_.given("master-addr");
    if (placement_.spawns_all() && job_.token.empty() && !is_named) {
      job_.token = membership::new_token();
    }
    const bool has_rank_0 = placement_.has_rank_0();
    LaunchPlan plan{.cmd = command_.name,
                    .config = config_of(options_, !has_rank_0),
                    .ranks = placement_.ranks,
                    .peer_timeout_s = job_.peer_timeout_s,
                    .max_restarts = static_cast<int>(options_.integer("max-restarts")),
                    .warning = placement_.warning};
    if (has_rank_0) {
      if (job_.job_id.empty()) job_.job_id = random_id();
      job_.generation = job_.generation.value_or(0);
      job_.listen_fd = listen_for_rank_0();
      plan.told.run_id = job_.effective.at(job::kRunId);
    } else {
      plan.save_grace = kAsRank0Ends;
    }
    static_cast<membership::Contact&>(plan.told) = job_;
    plan.told.started = job_.started;
    plan.role = [this](int rank) { return placement_.world_size != 0 ? role(rank) : ""; };
    plan.rank_main = [this](const SpawnedRank& spawned) { return run_spawned(spawned); };
    if (const std::string folder = options_.text("checkpoint"); has_rank_0 && !folder.empty()) {
      plan.save_grace = std::chrono::ceil<std::chrono::milliseconds>(
          std::chrono::duration<double>(options_.real("save-timeout")));
      plan.newest_checkpoint = [folder] { return store::CheckpointStore::newest(folder); };
    }
    plan.display = display();
    plan.log = log;
    plan.told.options = options_.values();
    return run_launcher(plan);
  }

  DisplayPlan display() const {
    const bool is_leader = !placement_.joins() || getpgrp() == getpid();
    const bool is_first = placement_.has_rank_0();
    DisplayPlan plan = plan_display(options_.flag("quiet") ? "none" : options_.text("progress"),
                                    options_.flag("pretty"), is_first, is_leader);
    if (placement_.shares_terminal && !is_first && options_.text("progress") != "plain") {
      plan.mode = std::min(plan.mode, DisplayPlan::Mode::kWarnings);
      plan.hint = false;
    }
    plan.header = header(is_first);
    if (!local_ && !placement_.spawns_all()) {
      plan.address = fmt::format("{}:{}", job_.master_addr, job_.master_port);
    }
    if (is_first && !options_.text("checkpoint").empty()) plan.to_go_on = command_to_go_on();
    return plan;
  }

  /// Prints the options (--print-config), the ranks that would start (--dry-run), and warnings.
  int preview() {
    const bool pretty = display().pretty, has_rank_0 = placement_.has_rank_0();
    Placement told = placement_;  // with a warning if a GPU is missing
    std::string out;
    const auto add = [&](const char* event, const Json& fields, const std::string& text = {},
                         const std::optional<int>& rank = {},
                         const std::string& role = "launcher") {
      out += pretty ? text : line_of(json_event(event, {}, command_.name, rank, role, fields));
    };
    if (options_.flag("print-config")) {
      add("config", config_fields(options_, !has_rank_0), config_file(options_, !has_rank_0));
    }
    for (const int rank : options_.flag("dry-run") ? placement_.here() : std::vector<int>()) {
      job_.rank = rank;
      const RankRun run = make_run();
      Json device = "cuda";
      try {
        if (run.knows_devices) run.devices->get(run.role, {});
        device = run.devices->names();
      } catch (const base::Exception& e) {  // the job may run on another host
        if (e.kind() != base::ErrorKind::kResources) throw;
        if (told.warning.size() == placement_.warning.size()) told.warn(e.error().message);
      }
      const bool is_known = rank != membership::kUnassignedRank;
      const int threads = set_up_threads(run.threads, run.local_ranks);
      const std::string name = is_known ? rank_name(rank, run.role) : "a free rank";
      add("plan", plan_of(rank, threads, device),
          fmt::format("{} on {}: threads {}, device {}\n", name, host_name(), threads,
                      device.is_null() ? "as rank 0 says" : device.dump()),
          is_known ? std::optional(rank) : std::nullopt, run.role);
    }
    const Json warn{{"kind", "invalid"}, {"message", told.warning}};
    if (!told.warning.empty()) add("warn", warn, "# warn: " + told.warning + '\n');
    Summary summary;
    summary.add({{"rss_mb", peak_rss_mb()}});
    add("end", summary.end_fields(has_rank_0 ? "job" : "rank", job_.started, {}));
    return print_text(out);
  }

 private:
  /// Returns the fields of the event `plan`.
  Json plan_of(int rank, int threads, const Json& device) const {
    constexpr const char* kModes[] = {"local", "join", "spawn"};
    const std::string name = local_ ? "local" : rank >= 0 ? role(rank) : "";
    const auto turn = place_in_turn(options_, definition_, placement_, rank, name);
    const std::string resume = placement_.has_rank_0() ? options_.text("resume") : "";
    const auto unless_0 = [](int value) { return value == 0 ? Json() : Json(value); };
    return {
        {"mode", kModes[static_cast<int>(placement_.mode)]},
        {"world_size", unless_0(placement_.world_size)},
        {"host", host_name()},
        {"threads", threads},
        {"device", device},
        {"gpu_turn", or_null(turn)},
        {"local_ranks", placement_.local_ranks},
        {"one_host", placement_.one_host},
        {"master_addr", placement_.master_addr},
        {"master_port", unless_0(placement_.master_port)},
        {"job_id", or_null(job_.job_id)},
        {"generation", or_null(placement_.generation)},
        {"source", or_null(placement_.source)},
        {"resume", or_null(job::checkpoint_to_resume({options_.text("checkpoint"), 0, resume}))}};
  }

  /// Returns the display's first line: "ps  server, 2 trainers, async  -  FOLDER  -  run 0123abcd".
  std::string header(bool has_rank_0) const {
    std::string text = command_.name + "  ";
    if (!has_rank_0) return text + fmt::format("rank {}", fmt::join(placement_.here(), ","));
    std::map<std::string, int> counts;  // number of ranks by role
    for (const std::string& name : definition_.roles(options_).names()) {
      ++counts[name.substr(0, name.find_last_not_of("0123456789") + 1)];
    }
    for (const auto& [name, count] : counts) {
      text += count == 1 ? name + ", " : fmt::format("{} {}s, ", count, name);
    }
    if (local_) text = command_.name + "  one process, ";
    if (const std::string mode = options_.text("mode"); !mode.empty()) text += mode + ", ";
    text.resize(text.size() - 2);
    if (const Json data = data_of(options_, false); data.is_string()) {
      text += "  -  " + data.get<std::string>();
      const bool is_random = options_.text("data").empty() && text.ends_with("random labels");
      if (is_random) text += ": nothing can be learned";
    }
    return text + "  -  run " + job_.effective.at(job::kRunId).substr(0, 8);
  }

  /// Returns this command line with `--resume auto`, quoted for a shell.
  static std::string command_to_go_on() {
    std::ifstream file("/proc/self/cmdline");
    std::string text;
    for (std::string word; std::getline(file, word, '\0');) {
      const bool is_plain = word.find_first_of(" \t\n'\"\\$`!*?[](){}<>|&;#~") == word.npos;
      c10::ReplaceAll(word, "'", "'\\''");
      text += (is_plain && !word.empty() ? word : '\'' + word + '\'') + ' ';
    }
    return text + (text.ends_with("--resume auto ") ? "" : "--resume auto");
  }

  std::string role(int rank) const { return definition_.roles(options_).name_of(rank); }

  job::Job make_job(base::TimePoint started) const {
    job::Job job;
    job.name = command_.name;
    static_cast<membership::Contact&>(job) = placement_;
    if (options_.given("job-id")) job.job_id = options_.text("job-id");
    if (local_) job.world_size = 1;
    job.started = started;
    job.listen_addr = options_.text("listen");
    job.ports = port_range_of(options_.text("port-range"));
    job.insecure = options_.flag("insecure");
    job.transport = options_.text("transport");
    job.rpc_timeout_s = options_.real("rpc-timeout");
    job.collective_timeout_s = options_.real("collective-timeout");
    job.join_timeout_s = options_.real("join-timeout");
    job.peer_timeout_s = options_.real("peer-timeout");
    for (const Option& option : options_.table()) {
      if (!is_job_option(option)) continue;
      const bool untold = option.each_own && !options_.decided(option.name);
      job.effective[option.name] = untold ? "" : options_.text(option.name);
      // Leave out paths (kInput): ranks with different `given` are refused, but paths may differ.
      if (option.scope == Scope::kJob && options_.given(option.name)) {
        job.given[option.name] = options_.text(option.name);
      }
    }
    if (placement_.has_rank_0()) job.effective[job::kRunId] = random_id();
    return job;
  }

  std::string meeting_name(uint16_t port) const {
    return membership::meeting_name(job_.job_id, placement_.master_addr, port);
  }

  /// Returns true if all ranks are on this host, and no option asks for TCP, an address or a port.
  bool meets_by_unix_socket() const {
    const auto given = [this](const char* name) { return options_.given(name); };
    const bool is_one_host = placement_.spawns_all() || placement_.one_host;
    return is_one_host && job_.transport != "tcp" && !net::host_key().empty() &&
           !given("master-addr") && !given("master-port") && !given("listen") &&
           !given("port-range");
  }

  /// Binds a socket for rank 0 before any rank starts, so that a port in use is reported at once.
  int listen_for_rank_0() {
    if (meets_by_unix_socket()) {
      job_.rank_0_unix_name = membership::new_unix_name();
      return std::move(net::listen_unix(job_.rank_0_unix_name).value()).release();
    }
    net::Fd socket = membership::listen_as_rank_0(job_.listen_addr, placement_.master_addr,
                                                  job_.master_port, job_.ports);
    const net::SocketName name = net::local_name(socket.get());
    job_.master_port = name.port;
    if (placement_.spawns_all() && !placement_.master_addr_given) job_.master_addr = name.host;
    return socket.release();
  }

  const JobCommand& command_;
  const job::AnyDefinition& definition_;
  ParsedOptions options_;
  const Placement& placement_;
  const bool local_;
  job::Job job_;
};

}  // namespace

JobCommand::JobCommand(std::shared_ptr<const job::AnyDefinition> of)
    : job::JobInfo(of->info()), definition(std::move(of)) {
  table = whole_table(*this);
  if (roles.empty() && mistake.empty()) mistake = "it has no role";
}

int run_job_command(const JobCommand& command, const std::vector<std::string>& args,
                    base::TimePoint started, const Program* program) {
  const std::optional<SpawnedRank> spawned = take_spawned_rank();
  LogFile log;
  try {
    expect_working_directory();
    const job::AnyDefinition& definition = *command.definition;
    ParsedOptions options = parse_options(command.table, args, nullptr, program);
    read_config(options, program, spawned ? &spawned->options : nullptr);
    std::string changed;
    Placement placement =
        place(options, definition, [&] { changed = take_resumed_options(options, command.name); });
    if (!changed.empty()) placement.warn(changed);
    definition.complete(options);
    const auto preview = [&] { return Invocation(command, options, placement, started).preview(); };
    const bool is_dry = options.flag("dry-run");
    if (options.flag("print-config") && !is_dry) return preview();
    if (spawned) {  // skips the checks below, which the launcher has made
      _exit(Invocation(command, options, placement, spawned->started).run_spawned(*spawned));
    }
    if (!is_dry) log.open(options.text("log"));
    check_options(options, placement);
    if (const int cpus = base::available_cpus().count; options.integer("threads") > cpus) {
      placement.warn(fmt::format("--threads {}: this process may use {} CPU{}",
                                 options.text("threads"), cpus, cpus == 1 ? "" : "s"));
    }
    definition.check({.options = options,
                      .local = placement.is_local(),
                      .has_rank_0 = placement.has_rank_0(),
                      .ranks = placement.here(),
                      .warn = [&](const std::string& message) { placement.warn(message); }});
    check_devices(options, definition, placement);
    check_injections(options, definition, placement);
    if (const auto text = definition.answer(options)) return print_text(*text);
    std::string token = take_token(options, placement);
    if (is_dry) return preview();
    Invocation invocation(command, options, placement, started, std::move(token));
    return placement.spawns() ? invocation.launch(&log) : run_here(invocation.make_run(), &log);
  } catch (const base::Exception& e) {
    return report_failure(command.name, e.error(), started, args, &log);
  }
}

int run_predict_command(const Program& program, const std::vector<std::string>& args,
                        base::TimePoint started) {
  std::string cmd;
  LogFile log;
  try {
    expect_working_directory();
    if (args.empty() || args[0].starts_with('-')) {
      invalid("predict needs a checkpoint: {} predict CHECKPOINT [FILE] [OPTION]...", program.name);
    }
    const job::Snapshot saved = job::read_checkpoint(args[0], "predict", store::Depth::kManifest);
    const Json name = saved.state.value("cmd", Json());
    const JobCommand* command = program.find(name.is_string() ? name.get<std::string>() : "");
    if (!command) saved.refuse("not a checkpoint of this program's jobs");
    cmd = command->name;
    if (!command->has_predict) invalid("predict does not support checkpoints of " + cmd);

    std::vector<std::string> files;
    const std::vector<std::string> rest(args.begin() + 1, args.end());
    ParsedOptions options = parse_options(command->table, rest, &files, &program);
    const bool has_file = !files.empty() && files[0] != "-";
    const std::string input = has_file ? files[0] : job::kStandardInput;
    const bool reads = find_option(command->table, "data");
    if (reads && input == job::kStandardInput && isatty(STDIN_FILENO)) {
      say("reading examples from standard input; end with Ctrl-D");
    }
    take_model_options(options, saved);
    command->definition->complete(options);
    log.open(options.text("log"));
    Placement placement;
    placement.mode = Placement::Mode::kLocal;
    const Invocation invocation(*command, options, placement, started);
    RankRun run = invocation.make_run();
    run.display.header.clear();
    run.display.has_rank_0 = false;  // there is no job to resume
    run.display.mode =
        std::min(run.display.mode,
                 run.display.pretty ? DisplayPlan::Mode::kLines : DisplayPlan::Mode::kWarnings);
    run.body = [&](const job::Job& job, job::EventSink& sink) {
      return command->definition->run_predict(options, job, saved.path, input, sink);
    };
    return run_here(std::move(run), &log);
  } catch (const base::Exception& e) {
    return report_failure(cmd, e.error(), started, args, &log);
  }
}

int report_failure(const std::string& cmd, const base::Error& error, base::TimePoint started,
                   const std::vector<std::string>& args, LogFile* log) {
  Summary summary;
  summary.add({{"rss_mb", peak_rss_mb()}});
  Cause cause = cause_of(error);
  cause.host = host_name();
  const auto line = [&cmd](const char* event, const Json& fields) {
    return line_of(json_event(event, {}, cmd, std::nullopt, "launcher", fields));
  };
  const std::string lines[] = {line("error", error_fields(cause, started)),
                               line("end", summary.end_fields("job", started, cause))};
  say(error.message);
  const bool for_people = isatty(STDOUT_FILENO) || std::ranges::count(args, "--pretty") > 0;
  for (const std::string& each : lines) {
    if (log) log->write(each);
    const int failed = for_people ? 0 : write_all(STDOUT_FILENO, each);
    if (failed) return exit_code_of_write_error(failed, false);
  }
  return cause.exit_code;
}

int print_text(const std::string& text) {
  const int error = write_all(STDOUT_FILENO, text);
  return error == 0 ? 0 : exit_code_of_write_error(error);
}

}  // namespace distrain::app
