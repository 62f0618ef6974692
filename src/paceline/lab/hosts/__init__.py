"""Other trainers as benches run them: in processes of their own, with libraries that Paceline does not need."""
