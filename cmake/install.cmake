# What is installed, and as part of what: each component is one Debian package (packages.cmake), and has its name.
# Invariant: what a model server is built against is libkvq1 and libkvq-dev, and nothing else is in these.
file(READ systemd/kvqd.service KVQD_SERVICE)
string(REPLACE /usr/bin/kvqd ${CMAKE_INSTALL_FULL_BINDIR}/kvqd KVQD_SERVICE_INSTALLED "${KVQD_SERVICE}")
string(REPLACE /etc/kvq ${CMAKE_INSTALL_FULL_SYSCONFDIR}/kvq KVQD_SERVICE_INSTALLED "${KVQD_SERVICE_INSTALLED}")
file(CONFIGURE OUTPUT kvqd.service CONTENT "${KVQD_SERVICE_INSTALLED}" @ONLY)

# kvqd
install(TARGETS kvqd kvq-hold COMPONENT kvqd)
if(KVQ_CUDA)
  install(TARGETS kvqd-gpu DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/kvq COMPONENT kvqd)
endif()
install(FILES ${CMAKE_BINARY_DIR}/kvqd.service systemd/kvqd.socket DESTINATION lib/systemd/system COMPONENT kvqd)
install(FILES systemd/kvq.sysusers DESTINATION lib/sysusers.d RENAME kvq.conf COMPONENT kvqd)
install(FILES systemd/kvq.tmpfiles DESTINATION lib/tmpfiles.d RENAME kvq.conf COMPONENT kvqd)
install(FILES systemd/kvqd.toml DESTINATION ${CMAKE_INSTALL_FULL_SYSCONFDIR}/kvq COMPONENT kvqd)
install(FILES systemd/kvqd-gpu.conf systemd/kvqd-metrics.conf DESTINATION ${CMAKE_INSTALL_DATADIR}/kvqd COMPONENT kvqd)
install(DIRECTORY docs/monitoring DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/kvqd COMPONENT kvqd PATTERN "*.test.yml" EXCLUDE)

# kvqctl. Its completions are made by itself, so they are what its command line is.
set(KVQCTL_SHELLS ${CMAKE_BINARY_DIR}/completions)
file(MAKE_DIRECTORY ${KVQCTL_SHELLS})
foreach(shell bash zsh fish)
  add_custom_command(TARGET kvqctl POST_BUILD COMMAND kvqctl completion ${shell} > ${KVQCTL_SHELLS}/kvqctl.${shell} VERBATIM)
endforeach()
install(TARGETS kvqctl COMPONENT kvqctl)
install(TARGETS kvq-bench DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/kvq COMPONENT kvqctl)
install(FILES ${KVQCTL_SHELLS}/kvqctl.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kvqctl COMPONENT kvqctl)
install(FILES ${KVQCTL_SHELLS}/kvqctl.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions RENAME _kvqctl COMPONENT kvqctl)
install(FILES ${KVQCTL_SHELLS}/kvqctl.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT kvqctl)

# Man pages: the section is the end of the name.
file(GLOB KVQ_MAN_PAGES CONFIGURE_DEPENDS docs/man/*.[1-8])
foreach(page ${KVQ_MAN_PAGES})
  get_filename_component(section ${page} LAST_EXT)
  string(SUBSTRING ${section} 1 1 section)
  string(REGEX MATCH "kvqctl" component ${page})
  if(NOT component)
    set(component kvqd)
  endif()
  install(FILES ${page} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section} COMPONENT ${component})
endforeach()

# libkvq
include(CMakePackageConfigHelpers)
set(KVQ_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kvq)
file(RELATIVE_PATH KVQ_PREFIX_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(client/package/kvq.pc.in kvq.pc @ONLY)
configure_package_config_file(client/package/kvqConfig.cmake.in kvqConfig.cmake INSTALL_DESTINATION ${KVQ_CMAKE_DIR}
                              PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
write_basic_package_version_file(kvqConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(TARGETS kvq LIBRARY COMPONENT libkvq1 NAMELINK_COMPONENT libkvq-dev)
install(FILES include/kvq/kvq.h include/kvq/kvq.hpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kvq COMPONENT libkvq-dev)
install(FILES ${CMAKE_BINARY_DIR}/kvq.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT libkvq-dev)
install(FILES ${CMAKE_BINARY_DIR}/kvqConfig.cmake ${CMAKE_BINARY_DIR}/kvqConfigVersion.cmake DESTINATION ${KVQ_CMAKE_DIR} COMPONENT libkvq-dev)

# The Python package, as Debian places it. Its libkvq is the system's.
set(KVQ_PYTHON_DIR lib/python3/dist-packages/kvqd)
install(DIRECTORY client/python/kvqd/ DESTINATION ${KVQ_PYTHON_DIR} COMPONENT python3-kvqd
        PATTERN __pycache__ EXCLUDE PATTERN _native EXCLUDE)
install(FILES include/kvq/kvq.h DESTINATION ${KVQ_PYTHON_DIR}/_native COMPONENT python3-kvqd)
file(CONFIGURE OUTPUT python/METADATA @ONLY CONTENT "Metadata-Version: 2.1\nName: kvqd\nVersion: @PROJECT_VERSION@\n")  # for pip and its like
install(FILES ${CMAKE_BINARY_DIR}/python/METADATA DESTINATION ${KVQ_PYTHON_DIR}-${PROJECT_VERSION}.dist-info COMPONENT python3-kvqd)
