#include "distrain/job/definition.h"

namespace distrain::job {

RankBody::Known known_options(const OptionTable& table, const OptionMap& values) {
  RankBody::Known known;
  const auto data = values.find("data");
  const bool has_data = data != values.end() && is_path(*find_option(table, "data"), data->second);
  for (const Option& option : table) {
    // Checkpoints do not record the folder to save in or the checkpoint to resume from.
    const bool saved_where = option.group == "Checkpoints" && option.needs != "checkpoint";
    const bool has_effect = !(has_data ? option.random_only : option.data_only);
    if (!is_job_option(option) || saved_where || !has_effect || option.each_own) continue;
    const std::string& value = values.at(option.name);
    try {
      static_cast<void>(Json(value).dump());
    } catch (const Json::type_error&) {
      continue;  // a path that is not UTF-8 cannot be in a manifest
    }
    known.options[option.name] = value;
    if (!option.may_change) known.must_agree[option.name] = option.initial;
  }
  return known;
}

}  // namespace distrain::job
