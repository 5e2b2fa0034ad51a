# The library `distrain::distrain` for other projects, and the rules of `cmake --install`.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
option(DISTRAIN_INSTALL "Rules for cmake --install" ${PROJECT_IS_TOP_LEVEL})
set(distrain_package ${CMAKE_INSTALL_LIBDIR}/cmake/distrain)
set(distrain_program_source ${PROJECT_SOURCE_DIR}/cmd/openmp_wait.cpp)  # compiled into each program

# Adds libdistrain.so with all of the given layers. It shares their objects with the programs, because
# all code is compiled as position-independent code.
function(distrain_shared_library)
  list(TRANSFORM ARGN PREPEND distrain_ OUTPUT_VARIABLE layers)
  set(exports ${PROJECT_SOURCE_DIR}/cmake/library.map)
  file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/library.cpp CONTENT "// All is in the layers.\n")
  add_library(distrain_shared SHARED ${PROJECT_BINARY_DIR}/library.cpp)
  add_library(distrain::distrain ALIAS distrain_shared)
  list(JOIN layers "," whole)
  list(REVERSE layers)  # dependents first, otherwise CMake links the dependencies a second time
  set_target_properties(
    distrain_shared
    PROPERTIES OUTPUT_NAME distrain EXPORT_NAME distrain VERSION ${PROJECT_VERSION}
               SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
               # The folder of libdistrain_cuda.so, which is loaded from beside this library.
               LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
               LINK_LIBRARY_OVERRIDE "WHOLE_ARCHIVE,${whole}" LINK_DEPENDS ${exports})
  target_link_libraries(distrain_shared PRIVATE ${layers}
                                        PUBLIC distrain_torch nlohmann_json::nlohmann_json
                                               Threads::Threads)
  target_link_options(distrain_shared PRIVATE -Wl,--version-script=${exports})
  target_include_directories(
    distrain_shared INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(distrain_shared INTERFACE cxx_std_20)
  target_sources(
    distrain_shared
    INTERFACE $<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:$<BUILD_INTERFACE:${distrain_program_source}>$<INSTALL_INTERFACE:$<INSTALL_PREFIX>/${distrain_package}/openmp_wait.cpp>>)
  # NDEBUG as in LibTorch, because the layout of at::RecordFunction depends on it. FMT_HEADER_ONLY because
  # LibTorch's headers include its fmt, whose functions no library exports.
  target_compile_definitions(distrain_shared INTERFACE NDEBUG FMT_HEADER_ONLY)
  if(TARGET distrain_cuda_plugin)
    add_dependencies(distrain_shared distrain_cuda_plugin)
  endif()
endfunction()

# distrain_install(<layer>...): installs the programs, the library and the headers of these layers.
function(distrain_install)
  set(targets distrain distrain_shared)
  # Builds the library first, because './run demo' builds only the program.
  install(CODE "if(NOT EXISTS \"$<TARGET_FILE:distrain_shared>\")
    execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${PROJECT_BINARY_DIR}\" --target ${targets}
                    COMMAND_ERROR_IS_FATAL ANY)
  endif()")
  if(TARGET distrain_cuda_plugin)
    list(APPEND targets distrain_cuda_plugin)
    install(TARGETS distrain_cuda_plugin LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
  # LibTorch is not installed: the installed files keep the path to it, as with LibTorch's own package.
  set_target_properties(${targets} PROPERTIES INSTALL_RPATH ${torch_root}/lib)
  install(TARGETS distrain RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(TARGETS distrain_shared EXPORT distrainTargets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/include/distrain/distrain.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/distrain)
  foreach(layer IN LISTS ARGN)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/distrain/${layer}
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/distrain)
  endforeach()

  install(EXPORT distrainTargets NAMESPACE distrain:: DESTINATION ${distrain_package})
  distrain_check_torch(lacking)  # sets torch_version, which distrainConfig.cmake checks
  # Use a folder that find_package() does not search if build/<preset>/bin is in PATH.
  set(config ${PROJECT_BINARY_DIR}/package/distrainConfig)
  file(REMOVE ${PROJECT_BINARY_DIR}/distrainConfig.cmake)  # left by builds of an earlier version
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/distrainConfig.cmake.in ${config}.cmake
                                INSTALL_DESTINATION ${distrain_package})
  write_basic_package_version_file(${config}Version.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${config}.cmake ${config}Version.cmake ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake
                ${distrain_program_source}
          DESTINATION ${distrain_package})

  install(DIRECTORY ${PROJECT_SOURCE_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  set(completions ${PROJECT_SOURCE_DIR}/completions)
  set(share ${CMAKE_INSTALL_DATADIR})
  install(FILES ${completions}/distrain.bash RENAME distrain
          DESTINATION ${share}/bash-completion/completions)
  install(FILES ${completions}/_distrain DESTINATION ${share}/zsh/site-functions)
  install(FILES ${completions}/distrain.fish DESTINATION ${share}/fish/vendor_completions.d)
endfunction()
