#include <filesystem>

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "distrain/nn/pipeline.h"
#include "distrain/store/disk.h"
#include "distrain/store/file.h"
#include "process/output.h"
#include "program.h"
#include "run_log.h"

namespace distrain::app {

// The files that CMake compiles into the program: distrain_embed() in cmake/Embed.cmake.
extern const char* const kUplotScript;
extern const char* const kUplotStyle;
extern const char* const kUplotLicense;
extern const char* const kPageScript;
extern const char* const kPageStyle;

namespace {

/// Marks the pages of this program, which it may replace.
constexpr const char* kMarker = R"(<meta name="generator" content="distrain">)";

/// Returns the default of each option whose value in `config` is not the default, in words.
Json changed_options(const JobCommand& job, const Json& config) {
  Json changed = Json::object();
  for (const Option& option : job.table) {
    const auto value = config.find(json_name(option));
    if (!is_job_option(option) || value == config.end() || value->is_null()) continue;
    const std::string words = default_in_words(option);
    const std::string text = value->is_string()         ? value->get<std::string>()
                             : value->is_number_float() ? base::shortest(value->get<double>())
                                                        : value->dump();
    // A default in words lists several values, such as "20 with --data, otherwise 5".
    bool is_default = *value == job::json_value(option, option.initial);
    for (const std::string_view word : base::split(option.initial_in_words, ' ')) {
      is_default = is_default || word == text || word == text + ',';
    }
    if (!is_default) changed[json_name(option)] = words.empty() ? "none" : words;
  }
  return changed;
}

/// Returns the timeline of the schedule of a line `split`, as text; empty if the line is not valid.
std::string schedule_of(const Json& split) {
  constexpr double kMostPasses = 4096;
  const size_t stages = split.value("stage_s", Json::array()).size();
  const double micro_batches = number_in(split, "num_split").value_or(0);
  if (stages == 0 || micro_batches < 1 || micro_batches * stages > kMostPasses) return {};
  try {
    return nn::to_text(nn::make_schedule(text_in(split, "schedule"), static_cast<int>(stages),
                                         static_cast<int64_t>(micro_batches)));
  } catch (const base::Exception&) {  // a schedule of another version
    return {};
  }
}

/// Returns the data of the page, with at most about `most` rows in a table, `most` tables in a run,
/// `most` events of a kind, and `most` options that are not defaults, or differ between the runs.
Json data_of(const RunLog& log, const Program& program, const Json& trace, size_t most) {
  std::map<std::string, size_t> same;  // number of runs in which an option has a value
  for (const LoggedRun& run : log.runs) {
    for (const auto& [name, value] : run.config.items()) ++same[name + in_one_line(value)];
  }
  Json data{{"version", DISTRAIN_VERSION}, {"skipped", log.skipped}, {"trace", trace}};
  for (const LoggedRun& run : log.runs) {
    Json out{{"id", run.id},
             {"cmd", run.cmd},
             {"files", run.files},
             {"begin", run.begin},
             {"seconds", run.end - run.begin},
             {"verdict", verdict_of(run)},
             {"changed", Json::object()},
             {"config", Json::object()},
             {"events", Json::array()},
             {"tables", Json::array()},
             {"schedules", Json::object()}};
    if (const JobCommand* job = program.find(run.cmd)) {
      out["changed"] = changed_options(*job, run.config);
    }
    for (const auto& [name, value] : run.config.items()) {
      const std::string text = in_one_line(value);
      const bool is_common = same[name + text] == log.runs.size() && name != "threshold";
      if ((is_common && !out["changed"].contains(name)) || out["config"].size() == most) continue;
      const Json start = text.substr(0, most / 20) + " [truncated]";
      out["config"][name] = text.size() <= most / 20 ? value : start;
    }
    auto& details = out["verdict"]["details"].get_ref<Json::array_t&>();
    details.resize(std::min(details.size(), most));
    std::map<std::string, size_t> counts;
    size_t hidden = run.hidden_events;
    for (Json event : run.events) {
      const bool is_job_end = most > 0 && text_in(event, "scope") == "job";
      if (++counts[text_in(event, "event")] > most && !is_job_end && ++hidden) continue;
      event["t"] = std::round((event["ts"].get<double>() - run.begin) * 1e4) / 1e4;
      event.erase("ts");
      if (event["event"] == "split") {
        const std::string schedule = schedule_of(event);
        if (!schedule.empty()) out["schedules"][event["num_split"].dump()] = schedule;
      }
      out["events"].push_back(std::move(event));
    }
    for (const auto& [key, table] : run.tables) {
      if (out["tables"].size() == most) break;
      out["tables"].emplace_back(Json::parse(key)).update(table.to_json(most, run.begin));
    }
    out["hidden_events"] = hidden;
    out["hidden_tables"] = run.tables.size() - out["tables"].size();
    data["runs"].push_back(std::move(out));
  }
  return data;
}

std::string page_with(const Json& data) {
  // With ASCII only, and without the three characters below, no text ends the element.
  std::string json = in_one_line(data);
  for (const char c : {'<', '>', '&'}) {
    c10::ReplaceAll(json, std::string(1, c), fmt::format("\\u{:04x}", c));
  }
  return fmt::format(R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{}
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>distrain report</title>
<style>{}{}</style>
</head>
<body>
<noscript>This page needs JavaScript, which is part of it: it loads nothing.</noscript>
<script type="application/json" id="data">{}</script>
<!-- uPlot, which draws the charts: {} -->
<script>{}</script>
<script>{}</script>
</body>
</html>
)",
                     kMarker, kUplotStyle, kPageStyle, json, kUplotLicense, kUplotScript,
                     kPageScript);
}

std::string page_of(const RunLog& log, const Program& program, const Json& trace) {
  constexpr size_t kMostBytes = 1'950'000;
  for (size_t most = 4000;; most /= 2) {
    std::string page = page_with(data_of(log, program, trace, most));
    if (page.size() <= kMostBytes || most == 0) return page;
  }
}

/// Writes the page to a new file beside `path`, which then replaces the file at `path`, so that a
/// failure leaves no part of a page. Throws `invalid` if the file exists and is not a page of ours.
int write_page(const std::string& path, const std::string& page) {
  if (path == "-") return print_text(page);
  struct stat info {};
  const bool exists = stat(path.c_str(), &info) == 0, is_special = exists && !S_ISREG(info.st_mode);
  if (exists && !is_special && info.st_size > 0) {
    std::string first(1024, ' ');
    first.resize(store::InputFile(path).read(first.data(), first.size()));
    if (first.find(kMarker) == first.npos)
      invalid("-o {}: exists and is not a page of report: it is not replaced", path);
  }
  // A link still leads to its file. A device or a pipe cannot be replaced.
  const std::string target = exists ? std::filesystem::canonical(path).string() : path;
  const std::string part = is_special ? path : fmt::format("{}.{}.tmp", target, getpid());
  const net::Fd file(open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  int error = file.valid() ? write_all(file.get(), page) : errno;
  if (!is_special && error == 0 && rename(part.c_str(), target.c_str()) != 0) error = errno;
  if (!is_special && error != 0 && file.valid()) unlink(part.c_str());
  if (errno = error; error != 0) store::Disk::fail("cannot write", path);
  return 0;
}

}  // namespace

OptionTable report_options() {
  const auto option = [](const char* name, char short_name, const char* help) {
    return Option{.name = name,
                  .kind = ValueKind::kText,
                  .value_name = "FILE",
                  .scope = Scope::kInfo,
                  .group = "Options",
                  .help = help,
                  .short_name = short_name};
  };
  return {option("output", 'o', "write the page to FILE; - is standard output"),
          option("trace", 0, "also show where the time went, from the FILE of a job's --trace")};
}

int run_report_command(const Program& program, const std::vector<std::string>& args) {
  std::vector<std::string> files;
  const OptionTable table = report_options();
  const ParsedOptions options = parse_options(table, args, &files, nullptr, args.size());
  if (files.empty())
    invalid("report needs a file: {} report RUN.jsonl... -o report.html", program.name);
  const bool is_given = options.given("output");
  const std::string path = is_given ? options.text("output") : "-";
  if (!is_given && isatty(STDOUT_FILENO))
    invalid("report needs -o FILE: standard output is a terminal");
  RunLog log;
  for (const std::string& each : files) {
    if (each == "-" && isatty(STDIN_FILENO))
      say("reading JSON lines from standard input; end with Ctrl-D");
    log.read(each);
  }
  const Json trace = options.given("trace") ? trace_summary(options.text("trace")) : Json();
  return write_page(path, page_of(log, program, trace));
}

}  // namespace distrain::app
