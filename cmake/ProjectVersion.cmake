# SPDX-License-Identifier: Apache-2.0
#
# TILEDATTN_VERSION from pyproject.toml, the one place where the version is written.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
             "${CMAKE_CURRENT_SOURCE_DIR}/pyproject.toml")
file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/pyproject.toml" version_line
     REGEX "^version = \"[0-9]+\\.[0-9]+\\.[0-9]+[^\"]*\"$")
if(NOT version_line MATCHES "^version = \"(([0-9]+\\.[0-9]+\\.[0-9]+)[^\"]*)\"$")
  message(FATAL_ERROR "pyproject.toml has no single line of the form: version = \"1.2.3\"")
endif()
set(TILEDATTN_VERSION "${CMAKE_MATCH_2}")        # project() takes numbers only
set(TILEDATTN_VERSION_TEXT "${CMAKE_MATCH_1}")   # with a suffix such as rc1, shown to users
