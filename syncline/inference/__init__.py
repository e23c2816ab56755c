"""Using a trained model: what it says of pictures. Not here: training (`syncline.driver`) and the models (`zoo`)."""
