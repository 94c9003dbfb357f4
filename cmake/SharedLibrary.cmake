# SPDX-License-Identifier: Apache-2.0
#
# libtiledattn.so for engines in C++ and other languages, its headers, and a package for find_package(tiledattn).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# The objects themselves: linking the archive would leave out what nothing here calls.
add_library(tiledattn SHARED $<TARGET_OBJECTS:tiledattn_core>)
add_library(tiledattn::tiledattn ALIAS tiledattn)
target_link_libraries(tiledattn PRIVATE Threads::Threads)
if(TILEDATTN_HAVE_CUDA)
  target_link_libraries(tiledattn PRIVATE tiledattn_cuda)
endif()
target_compile_features(tiledattn INTERFACE cxx_std_17)
target_include_directories(
  tiledattn INTERFACE "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/src/cpp/include>"
                      "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
set_target_properties(tiledattn PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/tiledattn")
install(
  TARGETS tiledattn
  EXPORT tiledattn
  COMPONENT library
  INCLUDES
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(DIRECTORY src/cpp/include/tiledattn DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT library)
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT library)
# The exported file is the whole package: the library has no dependency that a user must find first.
install(EXPORT tiledattn FILE tiledattnConfig.cmake NAMESPACE tiledattn:: DESTINATION "${package_dir}"
        COMPONENT library)
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/tiledattnConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/tiledattnConfigVersion.cmake" DESTINATION "${package_dir}"
        COMPONENT library)
