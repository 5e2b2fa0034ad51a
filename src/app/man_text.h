#pragma once

namespace distrain::app {

// What the man pages of all programs have in common, in the form that man.cpp says. PROGRAM stands
// for the program's name.

/// The end of each DESCRIPTION: of the program's page, of a job's.
extern const char* const kProgramDescription;
extern const char* const kJobDescription;

/// The beginning of the program's OUTPUT, and what follows its events.
extern const char* const kOutput;
extern const char* const kOutputEnd;

struct ManSection {
  const char* title;
  const char* text;
};
/// Of the program's page, after OUTPUT.
extern const ManSection kSections[6];

}  // namespace distrain::app
