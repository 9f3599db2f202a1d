// The program of all tests with several processes: started plainly it runs the tests, with --role=NAME it is one of
// their peers.
#include "tests/support/role_process.h"

int main(int argc, char** argv) { return kvq::test::main_with_roles(argc, argv); }
