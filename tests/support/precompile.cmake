# Precompiles distrain's headers for the programs of a project outside this repository, by
# CMAKE_PROJECT_INCLUDE, so that the test that builds these programs is quick.
function(precompile_headers)
  get_property(programs DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  list(POP_FRONT programs first)
  target_precompile_headers(${first} PRIVATE <distrain/distrain.h>)
  foreach(program IN LISTS programs)
    target_precompile_headers(${program} REUSE_FROM ${first})
  endforeach()
endfunction()
cmake_language(DEFER CALL precompile_headers)
