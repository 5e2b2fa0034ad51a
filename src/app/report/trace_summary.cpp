#include <algorithm>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "process/output.h"
#include "run_log.h"

namespace distrain::app {

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
