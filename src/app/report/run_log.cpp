#include "run_log.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "distrain/store/file.h"
#include "process/output.h"

namespace distrain::app {
namespace {

constexpr size_t kLongestLine = 4 << 20;
constexpr size_t kLongestName = 64;
constexpr size_t kMostTables = 1 << 12;  // of a run
constexpr size_t kMostEvents = 1 << 14;  // of a kind in a run
constexpr size_t kMostKinds = 64;
constexpr size_t kMostRuns = 64;
constexpr double kLargest = 1e30;  // charts cannot draw larger numbers

/// Returns a copy of `value` that is small whatever was logged: long texts and lists are truncated.
Json shortened(const Json& value, size_t longest = 300, int depth = 3) {
  constexpr size_t kMostItems = 128;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return text.size() <= longest ? text : text.substr(0, longest) + " [truncated]";
  }
  if (!value.is_structured()) return value;
  Json out = value.is_array() ? Json::array() : Json::object();
  for (const auto& [name, item] : value.items()) {
    if (depth == 0 || out.size() == kMostItems) break;
    Json copy = shortened(item, longest, depth - 1);
    if (value.is_array())
      out.push_back(std::move(copy));
    else if (name.size() <= kLongestName)
      out[name] = std::move(copy);
  }
  return out;
}

/// Returns true if `value` has the type that the page's script expects in the field `name`: the
/// fields below are texts and lists, `rpc` is an object, and others are numbers.
bool is_usable(const std::string& name, const Json& value) {
  static const std::set<std::string> kTexts = {
      "event",  "role", "kind",   "message",   "cause",        "path",
      "action", "host", "status", "scope",     "signal",       "schedule",
      "set",    "data", "device", "lost_role", "returned_role"};
  static const std::set<std::string> kLists = {"stderr_tail", "ranks", "stage_s", "activations"};
  if (kTexts.contains(name)) return value.is_string();
  if (kLists.contains(name)) return value.is_array();
  if (!value.is_number() || name.size() > kLongestName) return name == "rpc" && value.is_object();
  return std::abs(value.get<double>()) < kLargest;
}

}  // namespace

void for_each_line(const std::string& path, const std::function<void(const std::string&)>& take) {
  store::GzipReader file(store::InputFile(path == "-" ? "/dev/stdin" : path));
  std::vector<char> piece(1 << 18);
  std::string line;
  while (const size_t bytes = file.read_some(piece.data(), piece.size())) {
    for (std::string_view rest(piece.data(), bytes); !rest.empty();) {
      const size_t end = rest.find('\n');
      line.append(rest.substr(0, std::min(end, kLongestLine - line.size())));
      if (end == rest.npos) break;
      take(line);
      line.clear();
      rest.remove_prefix(end + 1);
    }
  }
  if (!line.empty()) take(line);
}

void LogTable::add(const Json& line) {
  constexpr size_t kMostColumns = 24;
  ++lines_;
  columns_["ts"];
  for (const auto& [name, value] : line.items()) {
    const bool has_room = columns_.size() < kMostColumns || columns_.contains(name);
    if (!has_room || name == "v" || name == "rank" || !value.is_number() || !is_usable(name, value))
      continue;
    columns_[name].resize(lines_, std::nan(""));
    columns_[name].back() = value.get<double>();
  }
  for (auto& [name, column] : columns_) column.resize(lines_, std::nan(""));
}

std::set<size_t> LogTable::pick(size_t most) const {
  std::set<size_t> rows = {0, lines_ - 1};
  const auto add_extremes = [&rows](const std::vector<double>& column, size_t begin, size_t end) {
    size_t low = begin, high = begin;
    for (size_t row = begin; row < end; ++row) {
      if (std::isnan(column[row])) continue;
      if (!(column[row] >= column[low])) low = row;
      if (!(column[row] <= column[high])) high = row;
    }
    rows.insert({low, high});
  };
  for (const auto& [name, column] : columns_) add_extremes(column, 0, lines_);
  const auto main = columns_.find(columns_.contains("loss") ? "loss" : "reward");
  const size_t ranges = lines_ <= most ? lines_ : std::max<size_t>(most / 2, 1);
  for (size_t range = 0; range < ranges; ++range) {
    add_extremes(main == columns_.end() ? columns_.at("ts") : main->second, range * lines_ / ranges,
                 (range + 1) * lines_ / ranges);
  }
  return rows;
}

Json LogTable::to_json(size_t most, double begin) const {
  const std::set<size_t> rows = pick(most);
  Json out{{"lines", lines_}};
  for (const auto& [name, column] : columns_) {
    Json& numbers = out["columns"][name == "ts" ? "t" : name] = Json::array();
    for (const size_t row : rows) {  // a chart cannot show more than six digits
      const double number = name == "ts" ? column[row] - begin : column[row];
      numbers.push_back(std::strtod(fmt::format("{:.6g}", number).c_str(), nullptr));
    }
  }
  return out;
}

void LoggedRun::add(const Json& line, const std::string& file) {
  const std::string event = text_in(line, "event").substr(0, kLongestName);
  files.insert(file);
  begin = std::min(begin, *number_in(line, "ts"));
  end = std::max(end, *number_in(line, "ts"));
  if (cmd.empty()) cmd = text_in(line, "cmd").substr(0, kLongestName);
  if (event == "step" || event == "epoch" || event == "eval" || event == "episode") {
    Json key{{"event", event}};
    for (const char* name : {"rank", "role", "num_split", "set"}) {
      if (line.contains(name) && is_usable(name, line[name]))
        key[name] = shortened(line[name], kLongestName);
    }
    const std::string text = in_one_line(key);
    if (tables.size() < kMostTables || tables.contains(text)) tables[text].add(line);
  } else if (event != "prediction" && event != "text") {  // outputs, which the page does not show
    static const std::set<std::string> kAlways = {"end", "error", "rank_end", "restart"};
    const bool is_known = counts.size() < kMostKinds || counts.contains(event);
    const size_t count = ++counts[is_known ? event : ""];
    if (count > kMostEvents && !kAlways.contains(event)) return static_cast<void>(++hidden_events);
    Json& kept = events.emplace_back(Json::object());
    for (const auto& [name, value] : line.items()) {
      if (is_usable(name, value)) kept[name] = shortened(value);
    }
  }
  const auto options = line.find("config");
  if (event != "start" || options == line.end() || !options->is_object()) return;
  const double rank = number_in(line, "rank").value_or(kMostTables);
  if (rank < std::exchange(config_rank, std::min(config_rank, rank)))
    config = shortened(*options, 300, 2);
}

void RunLog::read(const std::string& path) {
  std::vector<Json> unassigned;  // lines of ranks that have not met, so that their run is unknown
  std::string last;              // id of the last line's run
  bool has_lines = false;
  ++files;
  const auto add_to = [&](const std::string& id) {
    auto run = std::ranges::find(runs, id, &LoggedRun::id);
    if (id.empty() || run == runs.end()) {
      if (runs.size() < kMostRuns) runs.push_back({.id = id});
      run = runs.end() - (runs.back().id == id ? 1 : 0);
    }
    for (const Json& line : unassigned) {
      run == runs.end() ? static_cast<void>(++skipped) : run->add(line, path);
    }
    unassigned.clear();
  };
  for_each_line(path, [&](const std::string& text) {
    if (text.find_first_not_of(" \t\r") == text.npos) return;
    Json line = Json::parse(text, nullptr, false);
    const double time = line.is_object() ? number_in(line, "ts").value_or(0) : 0;
    const bool is_ours = time > 0 && time < 1e11 && line.contains("v");
    if (!is_ours || text_in(line, "event").empty()) return static_cast<void>(++skipped);
    has_lines = true;
    Json key = Json::array();
    for (const char* name : {"run", "rank", "event", "ts"})
      key.push_back(line.contains(name) ? shortened(line[name], kLongestName, 0) : Json());
    const size_t hash = std::hash<std::string>()(in_one_line(key));
    if (seen.try_emplace(hash, files).first->second != files) return;
    const bool is_end = text_in(line, "event") == "end" || unassigned.size() == kMostEvents;
    const std::string id = text_in(line, "run").substr(0, kLongestName);
    unassigned.push_back(id.empty() ? shortened(line) : std::move(line));
    if (!id.empty()) last = id;
    if (!id.empty() || is_end) add_to(id);
  });
  if (!unassigned.empty()) add_to(last);
  if (!has_lines) {
    base::bad_data((path == "-" ? "standard input" : path) +
                   ": has no JSON line of distrain; a job prints them without --pretty");
  }
  for (LoggedRun& run : runs) {
    std::ranges::stable_sort(run.events, {},
                             [](const Json& line) { return *number_in(line, "ts"); });
  }
}

Json trace_summary(const std::string& path) {
  constexpr size_t kMostRows = 500;
  struct Row {
    int64_t count = 0;
    double total = 0, own = 0;  // us
  };
  std::map<double, std::string> roles;
  std::map<std::pair<std::string, double>, Row> rows;  // by name and rank
  std::vector<std::pair<double, Row*>> open;  // the ends of the events around the present one
  std::pair<double, double> thread;           // rank and thread of `open`
  for_each_line(path, [&](const std::string& text) {
    if (!text.starts_with(R"({"ph":"X")") && !text.starts_with(R"({"ph":"M")")) return;
    const Json event = Json::parse(text.substr(0, text.rfind('}') + 1), nullptr, false);
    if (!event.is_object()) return;
    const auto field = [&event](const char* name) { return number_in(event, name).value_or(-1); };
    const std::string name = text_in(event, "name").substr(0, 80);
    const double rank = field("pid"), begin = field("ts"), duration = field("dur");
    if (name == "process_name") roles[rank] = text_in(event["args"], "name").substr(0, 64);
    if (begin < 0 || duration < 0 || rows.size() > 100 * kMostRows) return;
    // A trace has the events of a thread by their begin, an outer event before those inside it.
    const std::pair now(rank, field("tid"));
    if (now != std::exchange(thread, now)) open.clear();
    while (!open.empty() && open.back().first <= begin) open.pop_back();
    if (!open.empty()) open.back().second->own -= duration;
    Row& row = rows[{name, rank}];
    ++row.count;
    row.total += duration;
    row.own += duration;
    open.emplace_back(begin + duration, &row);
  });
  if (rows.empty()) base::bad_data("--trace " + path + ": has no event of a trace of distrain");
  std::vector<Json> out;
  for (const auto& [key, row] : rows) {
    const std::string role =
        roles.contains(key.second) ? roles[key.second] : fmt::format("{:g}", key.second);
    const auto ms = [](double us) { return std::max(0.0, std::round(us) / 1e3); };
    out.push_back({key.first, role, row.count, ms(row.total), ms(row.own)});
  }
  std::ranges::stable_sort(out, [](const Json& a, const Json& b) { return a[4] > b[4]; });
  out.resize(std::min(out.size(), kMostRows));
  return out;
}

}  // namespace distrain::app
