/* A model server in C, as far as its build goes: the library that runs is the one that was installed. */
#include <kvq/kvq.h>
#include <stdio.h>

int main(void) {
  kvq_connect_options options = {0};
  kvq_client* client = NULL;
  options.size = sizeof options;
  options.socket_path = "/nonexistent/kvqd.sock";
  options.deadline_ms = 10;
  printf("%s %s\n", kvq_version(), kvq_status_name(kvq_connect(&options, &client)));
  return client == NULL ? 0 : 1;
}
