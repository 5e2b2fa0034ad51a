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

# Writes into `folder` the files that say where LibTorch is: the one in `torch_root`, if not empty, before others.
function(distrain_configure_for_torch folder torch_root)
  foreach(program distrain distrain-get-libtorch)
    configure_file(${PROJECT_SOURCE_DIR}/packaging/${program}.in ${folder}/${program} @ONLY)
  endforeach()
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/distrainConfig.cmake.in
                                ${folder}/distrainConfig.cmake INSTALL_DESTINATION ${distrain_package})
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
  # LibTorch is not installed: the installed files keep the path to it, as with LibTorch's own package. Files of
  # `cpack`'s packages do not (packaging/stage.cmake).
  set_target_properties(${targets} PROPERTIES INSTALL_RPATH ${torch_root}/lib)
  install(TARGETS distrain RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/distrain)
  install(TARGETS distrain_shared EXPORT distrainTargets
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES ${PROJECT_SOURCE_DIR}/include/distrain/distrain.h
          DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/distrain)
  foreach(layer IN LISTS ARGN)
    install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/distrain/${layer}
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/distrain)
  endforeach()

  install(EXPORT distrainTargets NAMESPACE distrain:: DESTINATION ${distrain_package})
  distrain_check_torch(lacking)  # sets torch_version, which the installed files check
  # Use folders that find_package() does not search if build/<preset>/bin is in PATH.
  set(files ${PROJECT_BINARY_DIR}/files)
  distrain_configure_for_torch(${files}/here ${torch_root})
  distrain_configure_for_torch(${files}/anywhere "")
  write_basic_package_version_file(${files}/distrainConfigVersion.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${files}/here/distrainConfig.cmake ${files}/distrainConfigVersion.cmake
                ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake ${distrain_program_source}
          DESTINATION ${distrain_package})
  install(PROGRAMS ${files}/here/distrain ${files}/here/distrain-get-libtorch DESTINATION ${CMAKE_INSTALL_BINDIR})

  set(share ${CMAKE_INSTALL_DATADIR})
  set(doc ${share}/doc/distrain)
  install(FILES ${PROJECT_SOURCE_DIR}/cmake/fetch.py ${PROJECT_SOURCE_DIR}/cmake/libtorch.txt
          DESTINATION ${share}/distrain)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/man/ DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${PROJECT_SOURCE_DIR}/NOTICES RENAME copyright DESTINATION ${doc})
  install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/CHANGELOG.md ${PROJECT_SOURCE_DIR}/SECURITY.md
          DESTINATION ${doc})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/docs ${PROJECT_SOURCE_DIR}/examples
          DESTINATION ${doc} PATTERN *.py EXCLUDE)
  set(completions ${PROJECT_SOURCE_DIR}/completions)
  install(FILES ${completions}/distrain.bash RENAME distrain
          DESTINATION ${share}/bash-completion/completions)
  install(FILES ${completions}/_distrain DESTINATION ${share}/zsh/site-functions)
  install(FILES ${completions}/distrain.fish DESTINATION ${share}/fish/vendor_completions.d)
endfunction()

# Configures `cpack`, which makes a .tar.gz and, on Debian, a .deb of what distrain_install() installs.
function(distrain_packages)
  set(CPACK_PACKAGE_NAME distrain)
  set(CPACK_PACKAGE_VENDOR "distrain contributors")
  set(CPACK_PACKAGE_CONTACT "distrain contributors")  # cpack -D CPACK_PACKAGE_CONTACT="NAME <MAIL>" names a person
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
  set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
  set(CPACK_SYSTEM_NAME linux-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_STRIP_FILES ON)
  set(CPACK_VERBATIM_VARIABLES ON)
  set(CPACK_PRE_BUILD_SCRIPTS ${PROJECT_SOURCE_DIR}/packaging/stage.cmake)
  # For stage.cmake.
  set(CPACK_DISTRAIN_FILES ${PROJECT_BINARY_DIR}/files/anywhere)
  set(CPACK_DISTRAIN_CONFIG ${distrain_package}/distrainConfig.cmake)

  set(CPACK_GENERATOR TGZ)
  find_program(DISTRAIN_SHLIBDEPS dpkg-shlibdeps)
  if(DISTRAIN_SHLIBDEPS)
    list(APPEND CPACK_GENERATOR DEB)
  endif()
  set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
  set(CPACK_DEBIAN_PACKAGE_SECTION science)
  set(CPACK_DEBIAN_PACKAGE_DESCRIPTION
      "Parameter servers, DDP, pipelines and actors, as a command and a C++ library on\nLibTorch. LibTorch itself is not in this package: distrain-get-libtorch fetches\nit, or LIBTORCH=<dir> names another copy.")
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${torch_root}/lib)
  set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "nlohmann-json3-dev, python3-pip")  # find_package(), distrain-get-libtorch
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "cmake, g++, jq")
  set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${PROJECT_SOURCE_DIR}/packaging/postrm ${PROJECT_SOURCE_DIR}/packaging/triggers)
  set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
  include(CPack)
endfunction()
