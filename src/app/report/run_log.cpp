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
constexpr size_t kMostRows =
    1 << 15;  // a table is thinned to so many rows when it has twice as many
constexpr size_t kMostTables = 1 << 12;  // of a run
constexpr size_t kMostEvents = 1 << 14;  // of a run
constexpr size_t kMostRuns = 64;

/// Returns a copy of `value` that is small whatever was logged: long texts and lists are cut.
Json shortened(const Json& value, size_t longest = 300, int depth = 3) {
  constexpr size_t kMostItems = 128;
  if (value.is_string()) {
    const auto& text = value.get_ref<const std::string&>();
    return text.size() <= longest ? text : text.substr(0, longest) + " [cut]";
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
  constexpr double kLargest = 1e30;  // charts cannot draw larger numbers
  ++lines_;
  columns_["ts"];
  for (const auto& [name, value] : line.items()) {
    if (!value.is_number() || name == "v" || name == "rank" || name.size() > kLongestName) continue;
    const double number = value.get<double>();
    if (columns_.size() >= kMostColumns && !columns_.contains(name)) continue;
    columns_[name].resize(lines_, std::nan(""));
    if (std::abs(number) < kLargest) columns_[name].back() = number;
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
      if (line.contains(name)) key[name] = shortened(line[name], kLongestName, 0);
    }
    const std::string text = key.dump(-1, ' ', true, Json::error_handler_t::replace);
    if (tables.size() < kMostTables || tables.contains(text)) tables[text].add(line);
  } else if (events.size() < kMostEvents) {
    Json kept = shortened(line);
    for (const char* name : {"v", "run", "cmd", "config", "torch", "trust"}) kept.erase(name);
    kept["ts"] = line["ts"];
    events.push_back(std::move(kept));
  }
  const auto options = line.find("config");
  if (event != "start" || options == line.end() || !options->is_object()) return;
  const double rank = number_in(line, "rank").value_or(kMostTables);
  if (rank < std::exchange(config_rank, std::min(config_rank, rank))) config = shortened(*options);
}

void RunLog::read(const std::string& path) {
  std::vector<Json> unassigned;  // lines of ranks that have not met, so that their run is unknown
  std::string last;              // id of the last line's run
  bool has_lines = false;
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

}  // namespace distrain::app
